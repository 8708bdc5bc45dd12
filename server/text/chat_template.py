"""Turns the messages of a chat into the text of a prompt, as the model was trained to read it."""

import inspect
from pathlib import Path
from typing import Any, cast

from ..base.errors import cut

MAX_TEMPLATE_ERROR_CHARS = 400


class ChatTemplateError(ValueError):
    """The template cannot make a prompt of what it was given."""


def read_template(path: Path) -> str:
    """The template in a file. Raises ValueError saying why it cannot be used."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = path.read_text("utf-8-sig")  # a byte order mark is no part of a prompt
        render_jinja_template([[]], chat_template=template)
    except OSError as error:
        raise ValueError(f"cannot read it: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text: {error}") from None
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} does not compile: {error.message}") from None
    except Exception:  # it compiles, and wants messages
        pass
    if not template.strip():
        raise ValueError("it is empty")
    return template


class ChatTemplate:
    """The template that comes with a model, or several by name; can be called from any thread.

    It is rendered by the part of transformers that needs no torch. Templates run in a sandbox, and
    only the model's own and that of the settings: a request sends messages and variables, never a
    template.
    """

    def __init__(self, given: str | dict[str, str], special_tokens: dict[str, Any]) -> None:
        # Imported only now: it takes half a second, and base models have no template.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._given = given
        self._special_tokens = special_tokens
        self._render = render_jinja_template
        # Names that variables of the template cannot have, because they have a meaning already.
        self.reserved = frozenset(inspect.signature(render_jinja_template).parameters) | {
            "messages"
        }

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        """The prompt. The template may also read `variables`, none of which may be reserved.

        Raises ChatTemplateError.
        """
        try:
            template = self._chosen(has_tools=bool(tools))
            if not messages:
                raise ValueError("there are no messages")
            if "developer" not in template:
                # The newer name of the system message, which most templates would silently drop.
                messages = [
                    message | {"role": "system"} if message["role"] == "developer" else message
                    for message in messages
                ]
            # Clients send `null` for absent fields; many templates would write "None".
            messages = [
                {key: value for key, value in message.items() if value is not None}
                for message in messages
            ]
            rendered: Any = self._render(  # its signature says str, wrongly
                [messages],
                tools=tools or None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(self._special_tokens | variables),
            )
        except Exception as error:  # the template's code may raise anything
            raise ChatTemplateError(cut(error, MAX_TEMPLATE_ERROR_CHARS)) from error
        texts, _ = rendered
        return cast(str, texts[0])

    def _chosen(self, *, has_tools: bool) -> str:
        """The template for tools, if the request has tools and there is one; else the default."""
        if isinstance(self._given, str):
            return self._given
        names = ["tool_use", "default"] if has_tools else ["default"]
        for name in names:
            if name in self._given:
                return self._given[name]
        raise ValueError(f"none of its templates is the default: {', '.join(sorted(self._given))}")

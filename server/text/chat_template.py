"""From the messages of a chat to the text of its prompt, as the model was trained to read it."""

import inspect
from typing import Any, cast

from ..http.errors import cut

MAX_REASON_CHARS = 400


class ChatTemplateError(ValueError):
    """The template cannot make a prompt of what it was given."""


class ChatTemplate:
    """The template that comes with a model, or several by name; can be called from any thread.

    transformers renders it, by the part of it that needs no torch. Templates run in a sandbox, and
    the only ones that run are the model's own: a request sends messages and variables, never a
    template.
    """

    def __init__(self, given: str | dict[str, str], special_tokens: dict[str, Any]) -> None:
        # Only now: it takes half a second, and base models have no template.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._given = given
        self._special_tokens = special_tokens
        self._render = render_jinja_template
        # Names that a variable of the template cannot have, as they mean something already.
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
        """The prompt; `variables`, none of them reserved, are what else the template may read.

        Raises ChatTemplateError.
        """
        try:
            template = self._chosen(has_tools=bool(tools))
            if not messages:
                raise ValueError("there are no messages")
            if "developer" not in template:
                # The newer name of the system message; most templates would drop it silently.
                messages = [
                    message | {"role": "system"} if message["role"] == "developer" else message
                    for message in messages
                ]
            # Clients send `null` for what is absent; many templates would write "None".
            messages = [
                {key: value for key, value in message.items() if value is not None}
                for message in messages
            ]
            rendered: Any = self._render(  # not the str that its signature says
                [messages],
                tools=tools or None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(self._special_tokens | variables),
            )
        except Exception as error:  # whatever the template's code trips over in these messages
            raise ChatTemplateError(cut(error, MAX_REASON_CHARS)) from error
        texts, _ = rendered
        return cast(str, texts[0])

    def _chosen(self, *, has_tools: bool) -> str:
        """Of several templates that for tools, if there are any; else the default."""
        if isinstance(self._given, str):
            return self._given
        names = ["tool_use", "default"] if has_tools else ["default"]
        for name in names:
            if name in self._given:
                return self._given[name]
        raise ValueError(f"none of its templates is the default: {', '.join(sorted(self._given))}")

"""From the messages of a chat to the text of its prompt, as the model was trained to read it."""

import inspect
from typing import TYPE_CHECKING, Any, cast

from ..http.errors import cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REASON_CHARS = 400


class ChatTemplateError(ValueError):
    """The template cannot make a prompt of what it was given."""


class ChatTemplate:
    """The template that comes with a model; can be called from any thread.

    Templates run in a sandbox, and the only ones that run are the model's own: a request sends
    messages and variables, never a template.
    """

    def __init__(self, wrapper: "PreTrainedTokenizerBase") -> None:
        self._wrapper = wrapper
        # Names that a variable of the template cannot have, as they mean something to transformers.
        self.reserved = frozenset(inspect.signature(wrapper.apply_chat_template).parameters)

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
            template = self._wrapper.get_chat_template(tools=tools or None)
            if "developer" not in template:
                # The newer name of the system message; most templates would drop it silently.
                messages = [
                    message | {"role": "system"} if message["role"] == "developer" else message
                    for message in messages
                ]
            text = self._wrapper.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except Exception as error:  # whatever the template's code trips over in these messages
            raise ChatTemplateError(cut(error, MAX_REASON_CHARS)) from error
        return cast(str, text)

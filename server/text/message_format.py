"""How the served model marks what is not content: by a template of its own, or as is shown by its
chat template."""

from collections.abc import Sequence
from typing import Any

from ..config.server_settings import ToolCallFormat
from .message_parser import END_THINK, THINK, MarkerParser, MessageParser
from .tool_calls import FORMATS, LIST, shown_format

REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
# A prompt may end within the reasoning that it opens.
_MAX_OPENING_CHARS = 32
_MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")


def shows_reasoning(chat_template: str, response_template: dict[str, Any] | None) -> bool:
    """Whether the model's templates tell that it reasons, in a way that can be told apart."""
    if response_template is not None:
        return not REASONING_FIELDS.isdisjoint(response_template["fields"])
    return THINK in chat_template or END_THINK in chat_template


class MessageFormat:
    """Makes the parsers of answers."""

    def __init__(
        self,
        chat_template: str,
        response_template: dict[str, Any] | None = None,
        *,
        name: ToolCallFormat = "auto",
        reasoning: bool | None = None,
    ) -> None:
        known = FORMATS.get(name) or (shown_format(chat_template) if name == "auto" else None)
        self._format = known if response_template is None or name != "auto" else None
        self._template = response_template if name == "auto" else None
        self.has_calls = self._format is not None or self._template is not None
        self.has_reasoning = (
            shows_reasoning(chat_template, self._template) if reasoning is None else reasoning
        )
        self.short_ids = self._format is not None and self._format.short_ids

    @property
    def delimiters(self) -> tuple[str, ...] | None:
        """Special tokens that the parser must see; None: all."""
        return None if self._template is not None else (*_MARKERS, THINK, END_THINK)

    def parser(
        self,
        prompt: str,
        tools: Sequence[dict[str, Any]],
        *,
        must_call: bool = False,
        follows_grammar: bool = False,
    ) -> MessageParser | None:
        """For one answer to this prompt; None where content is all that can be told apart.

        An answer that must call is a JSON list of calls, whatever the model's own format. One that
        follows a grammar has no room for reasoning.
        """
        reasoning = self.has_reasoning and not follows_grammar
        if must_call:
            return MarkerParser(LIST, tools)
        if self._template is not None and (tools or reasoning):
            from .response_template import TemplateParser  # brings in transformers

            return TemplateParser(self._template, prompt, tools)
        form = self._format if tools else None
        if form is None and not reasoning:
            return None
        begun = reasoning and prompt[-_MAX_OPENING_CHARS:].rstrip().endswith(THINK)
        return MarkerParser(form, tools, reasoning=reasoning, begun=begun)

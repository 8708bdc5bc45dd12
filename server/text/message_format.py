"""How the served model marks reasoning and calls: according to its response template, or as its
chat template shows."""

import uuid
from typing import Any

from ..config.server_settings import ToolCallFormat
from .message_parser import END_THINK, REASONING_FIELDS, THINK, MarkerParser, MessageParser
from .tool_calls import CALL, END_CALL, FORMATS, LIST, Tools, shown_format

# A prompt may end within the reasoning that it opens.
_MAX_OPENING_CHARS = 32
_MARKERS = (CALL, END_CALL, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")


def shows_reasoning(chat_template: str, response_template: dict[str, Any] | None) -> bool:
    """Whether the model's templates show that it reasons, and how to tell that from content."""
    if response_template is not None:
        return not REASONING_FIELDS.isdisjoint(response_template["fields"])
    return THINK in chat_template or END_THINK in chat_template


class MessageFormat:
    """Creates the parsers of answers."""

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
        self.has_reasoning = (
            shows_reasoning(chat_template, self._template) if reasoning is None else reasoning
        )

    def new_call_id(self) -> str:
        short = self._format is not None and self._format.short_ids
        return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"

    @property
    def delimiters(self) -> tuple[str, ...] | None:
        """The special tokens that the parser must see; None: all."""
        return None if self._template is not None else (*_MARKERS, THINK, END_THINK)

    @property
    def markers_of_bindable_calls(self) -> tuple[str, ...] | None:
        """Markers that must be tokens for a grammar to bind calls; None: calls cannot be bound."""
        if self._format is None or not self._format.is_bindable:
            return None
        return (CALL, END_CALL, *((THINK, END_THINK) if self.has_reasoning else ()))

    def has_begun_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer begins within a thought: one that the prompt opens at its end, or one
        that is open in the turn which the answer continues."""
        opens = prompt[-_MAX_OPENING_CHARS:].rstrip().endswith(THINK)
        is_open = continued.rfind(THINK) > continued.rfind(END_THINK)
        return self.has_reasoning and (opens or is_open)

    def parser(
        self,
        prompt: str,
        tools: Tools,
        *,
        continued: str = "",
        must_call: bool = False,
        follows_grammar: bool = False,
        calls_are_json: bool = False,
    ) -> MessageParser | None:
        """A parser for one answer to this prompt, which may continue the turn that ends the prompt;
        None if everything in the answer is content.

        An answer that must call tools is a JSON list of calls, whatever the model's own format. An
        answer that follows a grammar contains no reasoning. If a grammar sees to it that
        `calls_are_json`, a marker within a string of theirs is text.
        """
        reasoning = self.has_reasoning and not follows_grammar
        if must_call:
            return MarkerParser(LIST, tools)
        if self._template is not None and (tools or reasoning):
            from .response_template import TemplateParser  # imports transformers

            return TemplateParser(self._template, prompt, tools)
        form = self._format if tools else None
        if form is None and not reasoning:
            return None
        begun = reasoning and self.has_begun_reasoning(prompt, continued)
        return MarkerParser(
            form, tools, reasoning=reasoning, begun=begun, calls_are_json=calls_are_json
        )

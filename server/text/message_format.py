"""How the served model marks reasoning and calls: according to its response template, or as its
chat template shows.
"""

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..config.server_settings import ServerSettings, ToolCallFormat
from .call_formats import (
    ANSWER,
    CALL_FORMATS,
    LIST,
    THOUGHTS,
    CallFormat,
    Thoughts,
    shown_format,
    shown_thoughts,
)
from .call_stream import CallStart
from .harmony import HarmonyParser
from .message_parser import REASONING_FIELDS, MarkerParser, MessageParser
from .tokenizer import TokenizerData
from .tool_calls import Tools

# A prompt may end within the reasoning that it opens.
_MAX_OPENING_CHARS = 32


def shows_reasoning(chat_template: str, response_template: dict[str, Any] | None) -> bool:
    """Whether the model's templates show that it reasons, and how to separate that from content."""
    if response_template is not None:
        return not REASONING_FIELDS.isdisjoint(response_template["fields"])
    return shown_thoughts(chat_template) is not None


@dataclass(frozen=True, slots=True)
class ThoughtsFirst:
    """Thoughts before an answer that follows a grammar: between markers, or on channels."""

    thoughts: Thoughts | None = None
    begun: bool = False  # by the prompt
    channels: bool = False


class MessageFormat:
    """Creates the parsers of answers."""

    def __init__(
        self,
        chat_template: str,
        response_template: dict[str, Any] | None = None,
        *,
        name: ToolCallFormat = "auto",
        reasoning: bool | None = None,
        model_type: str = "",
    ) -> None:
        shown = shown_format(chat_template, model_type) or "none"
        self._template = response_template if name == "auto" else None
        if self._template is not None and _opens_calls(self._template, CALL_FORMATS.get(shown)):
            self._template = None  # ours reports the same calls while they are written
        chosen = shown if name == "auto" else name
        self.name = chosen if self._template is None else "as the model's response template says"
        self._format = CALL_FORMATS.get(chosen) if self._template is None else None
        # Also the markers of calls that are not to be read: they stay in the text.
        forms = filter(None, (self._format, CALL_FORMATS.get(shown)))
        self._markers = tuple(mark for form in forms for mark in form.markers)
        self._thoughts = shown_thoughts(chat_template) or THOUGHTS[0]
        # Even if no calls are read, this format has messages in place of markers.
        self._has_channels = (self._format or CALL_FORMATS.get(shown)) is CALL_FORMATS["harmony"]
        shows = shows_reasoning(chat_template, self._template) or self._has_channels
        self.has_reasoning = shows if reasoning is None else reasoning

    @classmethod
    def of(cls, tokenizer: TokenizerData, settings: ServerSettings) -> "MessageFormat":
        return cls(
            str(tokenizer.chat_template),
            tokenizer.response_template,
            name=settings.tool_call_format,
            reasoning=settings.reasoning_content,
            model_type=tokenizer.model_type,
        )

    def call_id(self, call: CallStart, prefix: str = "call_") -> str:
        """The id of a call: as the model has written it, or a new one."""
        if call.id is not None:
            return call.id
        short = self._format is not None and self._format.short_ids
        return uuid.uuid4().hex[:9] if short else f"{prefix}{uuid.uuid4().hex[:24]}"

    @property
    def reads_calls(self) -> bool:
        """Whether calls of tools are found in an answer."""
        return self.name != "none"

    @property
    def delimiters(self) -> tuple[str, ...] | None:
        """The special tokens that the parser must see; None: all."""
        if self._template is not None:
            return None
        return (*self._markers, *self._thoughts.tokens)

    @property
    def markers_of_bindable_calls(self) -> tuple[str, ...] | None:
        """Markers that must be tokens for a grammar to bind calls; None: calls cannot be bound."""
        if self._format is None or not self._format.is_bindable:
            return None
        return (*self._format.markers, *(self._thoughts.tokens if self.has_reasoning else ()))

    def has_begun_reasoning(self, prompt: str, continued: str) -> bool:
        """Whether the answer begins within a thought: one that the prompt opens at its end, or one
        that is open in the turn which the answer continues.
        """
        begin, end = self._thoughts.open, self._thoughts.close
        opens = prompt[-_MAX_OPENING_CHARS:].rstrip().endswith(begin.rstrip())
        is_open = continued.rfind(begin) > continued.rfind(end)
        return self.has_reasoning and (opens or is_open)

    def thoughts_before_answer(
        self,
        prompt: str,
        are_tokens: Callable[[Collection[str]], bool],
        *,
        begun: bool,
        continues: bool,
    ) -> ThoughtsFirst | None:
        """The thoughts that may come before an answer which follows a grammar; None: there are
        none, or a grammar cannot see where they end. `begun`: by the prompt; `continues`: the
        answer goes on with a turn.
        """
        if self._template is not None or not self.has_reasoning:
            return None
        if self._has_channels:
            known = are_tokens(CALL_FORMATS["harmony"].markers) and prompt.endswith(
                "<|start|>assistant"
            )
            return ThoughtsFirst(channels=True) if known else None
        is_over = prompt[-_MAX_OPENING_CHARS:].rstrip().endswith(self._thoughts.close)
        if not begun and (is_over or continues):
            return None
        thoughts = self.thoughts_between_tokens(are_tokens)
        return ThoughtsFirst(thoughts, begun=begun) if thoughts is not None else None

    def thoughts_between_tokens(
        self, are_tokens: Callable[[Collection[str]], bool]
    ) -> Thoughts | None:
        """The markers of thoughts; None: there are no thoughts, or others than between tokens."""
        is_known = self.has_reasoning and self._template is None and not self._has_channels
        return self._thoughts if is_known and are_tokens(self._thoughts.tokens) else None

    def parser(
        self,
        prompt: str,
        tools: Tools,
        *,
        continued: str = "",
        must_call: bool = False,
        follows_grammar: bool = False,
        thinks_first: bool = False,
        calls_are_json: bool = False,
    ) -> MessageParser | None:
        """A parser for one answer to this prompt, which may continue the turn that ends the prompt;
        None if everything in the answer is content.

        An answer that must call tools is a JSON list of calls, whatever the model's own format. An
        answer that follows a grammar contains no other calls, and no reasoning unless it
        `thinks_first`. If a grammar sees to it that `calls_are_json`, a marker within a string of
        theirs is text.
        """
        reasoning = self.has_reasoning and (thinks_first or not follows_grammar)
        if must_call or (follows_grammar and reasoning and not self._has_channels):
            return MarkerParser(
                LIST if must_call else ANSWER,
                tools,
                thoughts=self._thoughts if reasoning and follows_grammar else None,
                begun=reasoning and follows_grammar and self.has_begun_reasoning(prompt, continued),
            )
        if follows_grammar:
            tools = {}
        if self._template is not None and (tools or reasoning):
            from .response_template import TemplateParser  # imports transformers

            return TemplateParser(self._template, prompt, tools)
        if self._has_channels and (tools or reasoning):
            return HarmonyParser(prompt, tools if self._format is not None else {})
        form = self._format if tools else None
        if form is None and not reasoning:
            return None
        begun = reasoning and self.has_begun_reasoning(prompt, continued)
        return MarkerParser(
            form,
            tools,
            thoughts=self._thoughts if reasoning else None,
            begun=begun,
            calls_are_json=calls_are_json,
        )


def _opens_calls(response_template: dict[str, Any], form: CallFormat | None) -> bool:
    """Whether the template's calls begin with a marker of this format."""
    calls = response_template["fields"].get("tool_calls", {})
    given = str(calls.get("open") or calls.get("open_pattern") or "").replace("\\", "")
    return form is not None and any(mark in given for mark in form.open if len(mark) > 1)

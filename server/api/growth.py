"""How an answer grows, in every API: block by block, of which the last one grows."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..text.call_stream import CallStart
from ..text.message_parser import MessagePart, Text

BlockKind = Literal["text", "reasoning", "call", "free_text_call"]


@dataclass(slots=True, eq=False)
class AnswerBlock:
    """A run of text or of reasoning, or one call with its arguments."""

    kind: BlockKind
    index: int  # in the answer
    num_calls: int  # of the answer so far, this one included
    call: CallStart | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def started_call(self) -> CallStart:
        assert self.call is not None  # it is no text
        return self.call


# What happens to a block, and the text that it grows by.
BlockChange = tuple[Literal["opens", "grows", "closes"], AnswerBlock, str]


class Growth:
    """Takes in the parts of an answer; reports what each of them changes."""

    def __init__(self) -> None:
        self._open: AnswerBlock | None = None
        self._num_blocks = self._num_calls = 0

    def add(self, part: MessagePart) -> Iterator[BlockChange]:
        if isinstance(part, CallStart):
            yield from self._begin("free_text_call" if part.is_free_text else "call", part)
            return
        if isinstance(part, Text):
            kind: BlockKind = "reasoning" if part.reasoning else "text"
            if self._open is None or self._open.kind != kind:
                yield from self._begin(kind)
        assert self._open is not None  # arguments follow the start of a call
        self._open.pieces.append(part.text)
        yield "grows", self._open, part.text

    def close(self) -> Iterator[BlockChange]:
        """The answer ends, or stops for good."""
        if (block := self._open) is not None:
            self._open = None
            yield "closes", block, ""

    def _begin(self, kind: BlockKind, call: CallStart | None = None) -> Iterator[BlockChange]:
        yield from self.close()
        self._num_calls += call is not None
        self._open = AnswerBlock(kind, self._num_blocks, self._num_calls, call)
        self._num_blocks += 1
        yield "opens", self._open, ""

"""Which kind of token each character of an answer comes from, for `outrider chat`."""

import codecs
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

STYLES = {
    "accepted": "green",
    "recovered": "yellow underline",
    "bonus": "bold cyan",
    "plain": "",
    "own": "yellow",  # recovered, bonus or plain: without a trace, these cannot be told apart
}


class Painter:
    """Takes the chunks of one answer, and returns its text in pieces with their kinds.

    The kinds come from the trace of a chunk's steps. A server without traces still reports the
    tokens of each step: all but the last of them were drafted.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_steps = 0
        self._text = ""  # text of tokens that the answer has not shown yet
        self._kinds: list[str] = []  # the kind of each of its characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, choice: dict[str, Any]) -> None:
        """Learn the tokens of a chunk's choice."""
        for tokens in self._steps(choice):
            self.num_steps += 1
            for text, kind in tokens:
                self.counts[kind] += 1
                self._text += text
                self._kinds += [kind] * len(text)

    def paint(self, text: str) -> Iterator[tuple[str, str]]:
        """The shown text in pieces, each with its kind."""
        start = self._text.find(text)  # tokens before it may not be shown
        kinds = ["plain"] * len(text)
        if start >= 0:
            end = start + len(text)
            kinds = self._kinds[start:end]
            self._text, self._kinds = self._text[end:], self._kinds[end:]
        at = 0
        for kind, run in groupby(kinds):
            length = len(list(run))
            yield text[at : at + length], kind
            at += length

    def _steps(self, choice: dict[str, Any]) -> Iterator[list[tuple[str, str]]]:
        """For each step, the text that its tokens added, and their kinds."""
        if "trace" in choice:
            for step in choice["trace"] or ():
                yield [(token["text"], token["kind"]) for token in step["tokens"]]
        elif tokens := (choice.get("logprobs") or {}).get("content"):
            texts = [self._decoder.decode(bytes(token["bytes"])) for token in tokens]
            yield [(text, "accepted") for text in texts[:-1]] + [(texts[-1], "own")]

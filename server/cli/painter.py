"""Which kind of token each character of an answer comes from, for `outrider chat`."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

STYLES = {
    "accepted": "green",
    "recovered": "yellow underline",
    "bonus": "bold cyan",
    "plain": "",
}


class Painter:
    """Takes the chunks of one answer, and returns its text in pieces, each with its kind, which it
    finds in the traces of the chunks.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_steps = 0
        self._text = ""  # text of tokens that the answer has not shown yet
        self._kinds: list[str] = []  # the kind of each of its characters

    def take(self, choice: dict[str, Any]) -> None:
        """Learn the tokens of a chunk's choice."""
        for step in choice.get("trace") or ():
            self.num_steps += 1
            for token in step["tokens"]:
                text, kind = token["text"], token["kind"]
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

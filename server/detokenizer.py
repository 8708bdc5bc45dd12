"""Token ids to text, one token at a time, up to the first stop string."""

from collections.abc import Sequence

from outrider.server.tokenizer import INCOMPLETE, Tokenizer

# Tokens of the prompt that the first new token is decoded with. A character spans at most four;
# one more gives a clean place to start.
MAX_CONTEXT_TOKENS = 5
# Tokens that are decoded together before the oldest are let go.
MAX_WINDOW_TOKENS = 16


class Detokenizer:
    """Text of a growing sequence, character by whole character.

    The pieces of all `push` calls and of `flush` make up what decoding the sequence at once gives.
    Tokens are decoded within a short window that begins before them, since many tokenizers strip
    the space at the start of a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skipped_ids: frozenset[int],
        spaces_between_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped_ids
        # Of these, two in a row are shown as they are written, whatever the decoder would add.
        self._joined = frozenset() if spaces_between_special else tokenizer.special_ids
        self._last_id: int | None = None
        self._window = _context(tokenizer, prompt_token_ids)
        self._shown_chars = len(self._decode())  # of the window's text
        self._boundary = len(self._window)  # tokens of the window up to its last clean end

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._skipped:
            return ""
        joins = self._last_id in self._joined and token_id in self._joined
        self._last_id = token_id
        self._window.append(token_id)
        text = self._decode()
        # An unfinished character decodes to replacement characters, and only at the end: what is
        # before them stays as it is, whatever follows.
        whole_chars = len(text.rstrip(INCOMPLETE))
        piece = text[self._shown_chars : whole_chars]
        self._shown_chars = max(self._shown_chars, whole_chars)
        if whole_chars == len(text):
            if len(self._window) > MAX_WINDOW_TOKENS:
                del self._window[: self._boundary]
                self._shown_chars = len(self._decode())
            self._boundary = len(self._window)
        return self._tokenizer.pieces([token_id])[0] if joins else piece

    def flush(self) -> str:
        """What is held of a character that will not be completed."""
        return self._decode()[self._shown_chars :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


class StopStrings:
    """Text up to the stop string that is complete first; of several, the one that starts first.

    Holds back exactly what could still become a stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._max_held = max((len(stop) for stop in stops), default=1) - 1
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """What may be shown now that `text` has come; after a match, nothing more.

        A stop string that `text` completes counts only if it `may_stop`.
        """
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        num_held = len(self._held)
        text = self._held + text
        # What was held completes no stop string that counts, but may begin one.
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if may_stop and (start := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        if matches:
            end, start, self.matched = min(matches)
            self._held = ""
            return text[: end if self._include else start]
        shown = self._start_of_held(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, once nothing can follow it."""
        text, self._held = self._held, ""
        return text

    def _start_of_held(self, text: str) -> int:
        for start in range(max(0, len(text) - self._max_held), len(text)):
            if text[start] in self._first_chars:
                rest = text[start:]
                if any(stop.startswith(rest) for stop in self._stops):
                    return start
        return len(text)


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """The fewest last tokens of the prompt that end in a whole character; none if none do."""
    context: list[int] = []
    for token_id in reversed(prompt_token_ids[-MAX_CONTEXT_TOKENS:]):
        if token_id not in tokenizer.special_ids:
            context.insert(0, token_id)
            text = tokenizer.decode(context, skip_special_tokens=False)
            if text and not text.endswith(INCOMPLETE):
                return context
    return []

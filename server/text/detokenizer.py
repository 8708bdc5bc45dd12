"""Token ids to text, one token at a time, up to the first stop string."""

from collections.abc import Sequence

from .tokenizer import INCOMPLETE, Tokenizer

# Tokens of the prompt that are decoded together with the first new token. A character spans at most
# four tokens; one more gives a clean start.
MAX_CONTEXT_TOKENS = 5
# Tokens that are decoded together before the oldest are dropped.
MAX_WINDOW_TOKENS = 16
# An unfinished character has at most three bytes; at worst each is a token and reads as U+FFFD.
MAX_UNFINISHED = 3
# If more tokens than these end in no whole character, only the first and the last are kept: the
# first because a run of bytes that they break stays broken, the last because the unfinished
# character lies within them (three U+FFFD of three bytes each, after a part of another).
MAX_BROKEN_TOKENS = 24
FIRST_BROKEN_TOKENS, LAST_BROKEN_TOKENS = 4, 12


class Detokenizer:
    """The text of a growing sequence, in whole characters.

    The pieces from all `push` calls and `flush` together equal decoding the whole sequence at once,
    with one exception: if the bytes of a run of byte tokens are not valid text, a byte-fallback
    decoder turns the whole run into U+FFFD, including characters that were shown before.

    Tokens are decoded within a window that begins before them, because many tokenizers strip the
    space at the start of a text. The window is always short, and so is the work for each token.

    The `DecodeStream` of `tokenizers` is not exact: it raises for some runs of byte tokens, and
    never shows the end of a text that is no whole character.
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
        # Two of these in a row are shown as they are written, whatever the decoder would add.
        self._joined = frozenset() if spaces_between_special else tokenizer.special_ids
        self._last_id: int | None = None
        # The window, and how many characters of its text were shown.
        self._window, self._shown_chars = _context(tokenizer, prompt_token_ids)
        self._boundary = len(self._window)  # tokens of the window up to its last clean end

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._skipped:
            return ""
        joins = self._last_id in self._joined and token_id in self._joined
        self._last_id = token_id
        self._window.append(token_id)
        text = self._decode()
        # An unfinished character decodes to replacement characters, and only at the end: the text
        # before them is final.
        whole_chars = len(text.rstrip(INCOMPLETE))
        if whole_chars < len(text) and self._spells_replacement_character(text):
            whole_chars = len(text)
        is_broken = len(self._window) - self._boundary > MAX_BROKEN_TOKENS
        if is_broken:  # so many tokens cannot be just an unfinished character
            whole_chars = max(whole_chars, len(text) - MAX_UNFINISHED)
        piece = text[self._shown_chars : whole_chars]
        self._shown_chars = max(self._shown_chars, whole_chars)
        if whole_chars == len(text):
            if len(self._window) > MAX_WINDOW_TOKENS:
                del self._window[: self._boundary]
                self._shown_chars = len(self._decode())
            self._boundary = len(self._window)
        elif is_broken:
            num_held = len(text) - self._shown_chars
            del self._window[self._boundary + FIRST_BROKEN_TOKENS : -LAST_BROKEN_TOKENS]
            self._shown_chars = len(self._decode()) - num_held
        return self._tokenizer.pieces([token_id])[0] if joins else piece

    def flush(self) -> str:
        """What is held back of a character that will not be completed."""
        return self._decode()[self._shown_chars :]

    def _spells_replacement_character(self, text: str) -> bool:
        """Whether the tokens really spell the U+FFFD at the end of the window's text."""
        tail = b""
        for num_tokens in range(1, min(len(self._window), len(INCOMPLETE.encode())) + 1):
            tail = self._tokenizer.token_bytes(self._window[-num_tokens]) + tail
            if tail.endswith(INCOMPLETE.encode()):
                # In a run that is not valid text, each byte would read as one.
                before = self._window[:-num_tokens]
                rest = self._tokenizer.decode(before, skip_special_tokens=False)
                return len(text) - len(rest) == len(tail.decode(errors="replace"))
        return False

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


class StopStrings:
    """Text up to the stop string that is complete first; of several, the one that starts first.

    Holds back exactly what could still become a stop string. For each of them it keeps the first
    place where one may have begun. A place is given up once, so the work grows with the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._starts = [0] * len(stops)  # for each, where in the held text it may have begun
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that may be shown after `text` has arrived; nothing more after a match.

        A stop string that `text` completes counts only if it `may_stop`.
        """
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        text = self._held + text
        matches = []
        for i, stop in enumerate(self._stops):
            self._starts[i] = start = _begin(stop, text, self._starts[i], may_end=may_stop)
            if (end := start + len(stop)) <= len(text):
                matches.append((end, start, stop))
        if matches:
            end, start, self.matched = min(matches)
            self._held = ""
            return text[: end if self._include else start]
        num_shown = min(self._starts)
        self._starts = [start - num_shown for start in self._starts]
        self._held = text[num_shown:]
        return text[:num_shown]

    def flush(self) -> str:
        """The text that was held back, after the end of the text."""
        text, self._held = self._held, ""
        return text


def _begin(stop: str, text: str, start: int, *, may_end: bool) -> int:
    """The first place from `start` on where the stop string begins: whole if it `may_end` in the
    text, or cut short by the end of the text. The length of the text if there is none.
    """
    while (start := text.find(stop[0], start)) >= 0:
        piece = text[start : start + len(stop)]
        if stop.startswith(piece) and (may_end or len(piece) < len(stop)):
            return start
        start += 1
    return len(text)


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> tuple[list[int], int]:
    """The fewest last tokens of the prompt that end in a whole character, none if none do; and how
    many characters their text has.
    """
    context: list[int] = []
    for token_id in reversed(prompt_token_ids[-MAX_CONTEXT_TOKENS:]):
        if token_id not in tokenizer.special_ids:
            context.insert(0, token_id)
            text = tokenizer.decode(context, skip_special_tokens=False)
            if text and not text.endswith(INCOMPLETE):
                return context, len(text)
    return [], 0

"""What a grammar lets a sequence say next, in token ids. llguidance does the parsing."""

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # an engine that follows no grammars runs without it
    from llguidance import LLExecutor, LLMatcher


class Grammar:
    """Where one sequence stands in its grammar: behind its known tokens, or some drafts further.

    `drafts` are those of the current step, as far as the host knows them, and `masks[j]` is what
    may follow j of them: [words] int32, token x being bit x % 32 of word x // 32. Where the text is
    complete that includes the ids that end it. `error` says why nothing may follow any more.
    """

    def __init__(self, matcher: "LLMatcher", eos_mask: np.ndarray, end_mask: np.ndarray) -> None:
        self.num_known = 0  # output tokens that it has followed
        self.drafts: list[int] = []
        self.masks: list[np.ndarray] = []
        self.num_words = len(eos_mask)
        self._matcher = matcher
        self._eos_mask, self._end_mask = eos_mask, end_mask
        self._num_ahead = 0  # of the drafts, followed
        self._is_over = False  # an id that ends the text is among the known tokens
        self._is_over_ahead = False

    @property
    def error(self) -> str | None:
        if not self._matcher.is_error():
            return None
        said = self._matcher.get_error().partition("\n<non-verbose/>")[0]
        return "no token can go on with the text" if said == "NoExtensionBias" else said

    def follow(self, token_ids: list[int]) -> None:
        """Forget the step's drafts, and go on by the tokens that became known."""
        if self._num_ahead:
            self._matcher.rollback(self._num_ahead)
        self.drafts, self.masks, self._num_ahead = [], [], 0
        self.num_known += len(token_ids)
        if not self._is_over:
            self._is_over = self._matcher.try_consume_tokens(token_ids) < len(token_ids)
        self._is_over_ahead = self._is_over

    def fitting(self, token_ids: list[int]) -> list[int]:
        """As many of these as may follow the known tokens; they become the step's drafts."""
        num_fitting = 0 if self._is_over else self._matcher.validate_tokens(token_ids)
        self.drafts = token_ids[:num_fitting]
        return self.drafts

    def go_behind(self, num_drafts: int) -> "LLMatcher | None":
        """Stand behind that many drafts; None where the text is over or the grammar has failed."""
        for token_id in self.drafts[self._num_ahead : num_drafts]:
            if not self._is_over_ahead:
                num_consumed = self._matcher.try_consume_tokens([token_id])
                self._num_ahead += num_consumed
                self._is_over_ahead = num_consumed == 0
        return None if self._is_over_ahead or self._matcher.is_error() else self._matcher

    def add_mask(self, mask: np.ndarray) -> None:
        """Keep what the matcher said of the place behind `len(masks)` drafts."""
        if self._matcher.is_error():
            mask[:] = 0
        elif self._is_over_ahead:
            mask[:] = self._end_mask
        elif (mask & self._eos_mask).any():
            mask |= self._end_mask
        self.masks.append(mask)


def compute_masks(grammars: list[Grammar]) -> None:
    """The next mask of each, behind one draft more; in parallel."""
    if not grammars:
        return
    masks = np.zeros((len(grammars), grammars[0].num_words), dtype=np.int32)
    matchers = [
        (matcher, i)
        for i, grammar in enumerate(grammars)
        if (matcher := grammar.go_behind(len(grammar.masks))) is not None
    ]
    if matchers:
        _executor().unsafe_compute_mask_ptr(
            matchers, masks.ctypes.data, masks.strides[0], len(masks)
        )
    for grammar, mask in zip(grammars, masks, strict=True):
        grammar.add_mask(mask)


@functools.cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()

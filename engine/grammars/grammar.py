"""Which tokens a grammar allows a sequence next. Another process does the parsing."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # an engine that follows no grammars runs without msgspec
    from .grammar_messages import Told
    from .zygote import GrammarProcess, Question, Take


class Grammar:
    """Where one sequence stands in its grammar: after its known tokens, or some drafts further.

    Until the grammar `is_compiled`, nothing may be asked of it. `drafts` are those of the current
    step, as far as the host knows them. `masks[j]` says which tokens may follow j of them: [words]
    int32, token x is bit x % 32 of word x // 32. If the text is complete, the ids that end it are
    allowed too. `error` says why nothing may follow any more.
    """

    def __init__(
        self, process: "GrammarProcess", eos_mask: np.ndarray, end_mask: np.ndarray
    ) -> None:
        self.num_known = 0  # output tokens followed so far
        self.drafts: list[int] = []
        self.masks: list[np.ndarray] = []
        self.process = process
        self._sequence = process.new_sequence()
        self._eos_mask, self._end_mask = eos_mask, end_mask
        self._num_asked = 0  # masks of this step that were asked for
        self._untold: list[int] = []  # known tokens not yet sent to the process
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        return self._error or self.process.error

    @property
    def is_compiled(self) -> bool:
        begun = self.process.begun
        return begun.done() and begun.exception() is None

    @property
    def compile_error(self) -> str | None:
        """Why compiling failed, other than by a fault of the grammar itself."""
        error = self.process.begun.exception() if self.process.begun.done() else None
        return None if error is None else f"{type(error).__name__}: {error}"

    def leave(self) -> None:
        """The sequence has ended. A compilation that nobody waits for any more is stopped."""
        self.process.end_sequence(self._sequence)

    def follow(self, token_ids: list[int]) -> None:
        """Advance by newly known tokens, and forget the drafts of the step before."""
        self.drafts, self.masks, self._num_asked = [], [], 0
        self.num_known += len(token_ids)
        self._untold += token_ids

    def fitting(self, token_ids: list[int]) -> list[int]:
        """The leading ones of these tokens that the grammar allows; they become the drafts."""
        self.drafts = []
        if token_ids and self.error is None:

            def take(told: "Told | None") -> None:
                if told is not None:
                    self._error = told.error
                    self.drafts = token_ids[: told.num_fitting]

            self.process.ask([self._question(token_ids, take, fits=True)])
            self.process.receive()
        return self.drafts

    @property
    def is_asked(self) -> bool:
        """Whether the answer with the next mask is due."""
        return self._num_asked > len(self.masks)

    def ask_mask(self) -> "Question | None":
        """Asks what may follow one draft more than before; at first, none. None after an error."""
        drafts = self.drafts[: self._num_asked]
        self._num_asked += 1
        # The next step's masks are in another list, so that an answer may come too late.
        take = partial(self._add_mask, self.masks)
        if self.error is None:
            return self._question(drafts, take, fits=False)
        take(None)
        return None

    def _question(self, drafts: list[int], take: "Take", *, fits: bool) -> "Question":
        known, self._untold = self._untold, []
        return (self._sequence, known, drafts, fits), take

    def _add_mask(self, masks: list[np.ndarray], told: "Told | None") -> None:
        """Add the mask of an answer; without one, it bans all."""
        if told is not None:
            self._error = told.error
        if told is None or self.error is not None:
            mask = np.zeros_like(self._end_mask)
        elif told.is_over:
            mask = self._end_mask
        else:
            mask = np.frombuffer(told.mask, dtype=np.int32)
            if (mask & self._eos_mask).any():
                mask = mask | self._end_mask
        masks.append(mask)


def ask_masks(grammars: Iterable[Grammar]) -> None:
    """Ask for the next mask of each grammar, after one draft more: their processes compute them in
    parallel, and beside whatever this one does until it needs them.
    """
    questions: dict[GrammarProcess, list[Question]] = {}
    for grammar in grammars:
        if question := grammar.ask_mask():
            questions.setdefault(grammar.process, []).append(question)
    for process, of_process in questions.items():
        process.ask(of_process)


def compute_masks(grammars: list[Grammar], num_masks: list[int]) -> None:
    """Wait until each grammar has so many masks of this step, and ask for those not asked for."""
    while lacking := [g for g, n in zip(grammars, num_masks, strict=True) if len(g.masks) < n]:
        ask_masks(grammar for grammar in lacking if not grammar.is_asked)
        for process in dict.fromkeys(grammar.process for grammar in lacking):
            process.receive()

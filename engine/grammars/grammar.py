"""Which tokens a grammar allows a sequence next. Another process does the parsing."""

import numpy as np

from .grammar_messages import GrammarAnswer, Question
from .grammar_process import GrammarProcess


class Grammar:
    """Where one sequence stands in its grammar: after its known tokens, or some drafts further.

    Until the grammar `is_compiled`, nothing may be asked of it. `drafts` are those of the current
    step, as far as the host knows them. `masks[j]` says which tokens may follow j of them: [words]
    int32, token x is bit x % 32 of word x // 32. If the text is complete, the ids that end it are
    allowed too. `error` says why nothing may follow any more.
    """

    def __init__(self, process: GrammarProcess, eos_mask: np.ndarray, end_mask: np.ndarray) -> None:
        self.drafts: list[int] = []
        self.masks: list[np.ndarray] = []
        self.num_words = len(eos_mask)
        self.process = process
        self.last_step = 0  # that it was asked in
        self._sequence = process.new_sequence()
        self._eos_mask, self._end_mask = eos_mask, end_mask
        self._unsent: list[int] = []  # known tokens not yet sent to the process
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        return self._error or self.process.error

    @property
    def is_at_fault(self) -> bool:
        """Whether there is an error, and it is the grammar's own."""
        return self.error is not None and not self.process.was_killed

    @property
    def is_compiled(self) -> bool:
        begun = self.process.begun
        return begun.done() and begun.exception() is None

    @property
    def compile_error(self) -> str | None:
        """Why compiling failed, if that was not the grammar's fault."""
        error = self.process.begun.exception() if self.process.begun.done() else None
        return None if error is None else f"{type(error).__name__}: {error}"

    @property
    def may_end(self) -> bool:
        """Whether the known tokens are a whole text; the step must have asked what follows them."""
        return bool((self.masks[0] & self._eos_mask).any())

    def leave(self) -> None:
        """The sequence has ended. A compilation that nobody waits for any more is stopped."""
        self.process.end_sequence(self._sequence)

    def follow(self, token_ids: list[int]) -> None:
        """Advance by newly known tokens, and forget the drafts of the step before."""
        self.drafts, self.masks = [], []
        self._unsent += token_ids

    def set_drafts(self, token_ids: list[int]) -> None:
        """Other drafts of the step. Masks behind those that are the same are kept."""
        pairs = zip(self.drafts, token_ids, strict=False)
        num_same = [*(a == b for a, b in pairs), False].index(False)
        self.drafts, self.masks = token_ids, self.masks[: num_same + 1]

    def few_allowed(self, most: int = 16) -> list[int]:
        """The tokens that may come after the drafts, by the last mask, if there are few of them and
        the text cannot end there; else none.
        """
        mask = self.masks[-1]
        (words,) = np.nonzero(mask)
        if len(words) > most or (mask & self._end_mask).any():
            return []
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
        rows, columns = np.nonzero(bits)
        return (32 * words[rows] + columns).tolist() if len(rows) <= most else []

    def add_drafts(self, token_ids: list[int], answer: GrammarAnswer | None) -> None:
        """The leading ones of these tokens that the grammar allows become its drafts."""
        if answer is not None:
            self._error = answer.error
            self.set_drafts(token_ids[: answer.num_fitting])

    def question(self, drafts: list[int], *, fits: bool) -> Question:
        """Asks what may follow these drafts or, if `fits`, how many of them may follow."""
        known, self._unsent = self._unsent, []
        return Question(self._sequence, known, drafts, fits)

    def add_mask(self, mask: np.ndarray, answer: GrammarAnswer | None) -> None:
        """Store the answer in `mask`, which must be zeros; without an answer it bans all."""
        if answer is not None:
            self._error = answer.error
        if answer is None or self.error is not None:
            pass
        elif answer.is_over:
            mask[:] = self._end_mask
        else:
            mask[:] = np.frombuffer(answer.mask, dtype=np.int32)
            if (mask & self._eos_mask).any():
                mask |= self._end_mask
        self.masks.append(mask)


def compute_masks(grammars: list[Grammar]) -> None:
    """Compute the next mask of each grammar, after one draft more, in parallel."""
    if not grammars:
        return
    answers = _ask_all(grammars, [g.drafts[: len(g.masks)] for g in grammars], fits=False)
    masks = np.zeros((len(grammars), grammars[0].num_words), dtype=np.int32)
    for grammar, mask, answer in zip(grammars, masks, answers, strict=True):
        grammar.add_mask(mask, answer)


def fit_drafts(grammars: list[Grammar], drafts: list[list[int]]) -> None:
    """Cut the drafts of each sequence to those that its grammar allows, in parallel."""
    for grammar in grammars:
        grammar.set_drafts([])
    answers = _ask_all(grammars, drafts, fits=True)
    for grammar, ids, answer in zip(grammars, drafts, answers, strict=True):
        grammar.add_drafts(ids, answer)


def _ask_all(
    grammars: list[Grammar], drafts: list[list[int]], *, fits: bool
) -> list[GrammarAnswer | None]:
    """The answers of all processes, which work at the same time; None: it has failed.

    `drafts` and `fits` are as in `Grammar.question`.
    """
    asking: dict[GrammarProcess, list[int]] = {}
    for i, grammar in enumerate(grammars):
        if grammar.error is None:
            asking.setdefault(grammar.process, []).append(i)
    for process, rows in asking.items():
        process.ask([grammars[i].question(drafts[i], fits=fits) for i in rows])
    answers: dict[int, GrammarAnswer] = {}
    for process, rows in asking.items():
        answers |= zip(rows, process.answers(), strict=False)  # no answers if the process died
    return [answers.get(i) for i in range(len(grammars))]

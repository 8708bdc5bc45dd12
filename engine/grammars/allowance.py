"""How much of everybody's time the process of one grammar may take."""

_STEP_S = 0.01  # of each step
_FREE_S = 0.0001  # of each question: what an ordinary mask takes
_FIRST_QUESTION_S = 0.002  # until it is known


class Allowance:
    """Limits the questions of one process, for all sequences of a step wait for its answers.

    It gets `_STEP_S` a step. What a step takes beyond that is a debt, and while there is one its
    sequences sit out. Whether a sequence may take part depends on earlier steps alone, and so not
    on what this step would draw.
    """

    def __init__(self) -> None:
        self._left_s = 0.0
        self._question_s = _FIRST_QUESTION_S  # beyond what is free; doubts last for some steps

    def begin_step(self) -> None:
        self._left_s = self._planned_s = min(_STEP_S, self._left_s + _STEP_S)

    def take(self, wanted: int) -> int:
        """How many of so many questions a sequence may ask in this step; 0: it sits out."""
        num = int(self._planned_s / self._question_s)
        # Even one may cost more than a step's time: it needs all of that.
        num = max(min(wanted, num), int(self._planned_s == _STEP_S))
        self._planned_s -= num * self._question_s
        return num

    def charge(self, spent_s: float, num_questions: int) -> None:
        """So many questions took so much processor time."""
        spent_s = max(0.0, spent_s - num_questions * _FREE_S)
        self._left_s -= spent_s
        self._question_s = max(spent_s / num_questions, self._question_s / 2, 1e-9)

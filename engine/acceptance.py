"""How often drafts are accepted: a model's by their position, looked-up ones by sequence."""

import logging
import operator
from collections.abc import Sequence
from itertools import accumulate

log = logging.getLogger(__name__)

PRIOR_ACCEPTANCE, PRIOR_DRAFTS = 0.7, 8  # assumed at first, and as how many drafts that counts
LIKENESS = 4  # drafts that the acceptance of the position before counts as
KEPT, KEPT_IDLE = 1 - 1 / 48, 0.99  # of what was seen: by a step with drafts, and by one without


class Acceptance:
    """Of a model's drafts, in all sequences.

    `by_position[j]` is the chance that draft j is accepted if those before it are. Shape: [max_k].
    """

    def __init__(self, max_k: int) -> None:
        self.by_position = [PRIOR_ACCEPTANCE] * max_k
        # By position, of the drafts whose predecessors were accepted; the latest count for most.
        self._right = [PRIOR_ACCEPTANCE * PRIOR_DRAFTS] * max_k
        self._tried = [float(PRIOR_DRAFTS)] * max_k

    def observe(self, wanted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step: of `wanted[i]` drafts for sequence i, `accepted[i]` were accepted."""
        drafted = [(w, a) for w, a in zip(wanted, accepted, strict=True) if w]
        kept, before = KEPT if drafted else KEPT_IDLE, None
        for j, (right, tried) in enumerate(zip(self._right, self._tried, strict=True)):
            reached = [a for w, a in drafted if j < w and j <= a]
            kept_of_it = max(kept, min(1.0, PRIOR_DRAFTS / tried))  # its weight fades, no further
            self._right[j] = kept_of_it * right + sum(a > j for a in reached)
            self._tried[j] = kept_of_it * tried + len(reached)
            weight = 0 if before is None else LIKENESS
            seen = self._right[j] + weight * (before or 0.0)
            self.by_position[j] = before = seen / (self._tried[j] + weight)

    def expected(self, k: int) -> float:
        """How many of k drafts are expected to be accepted."""
        return sum(accumulate(self.by_position[:k], operator.mul), 0.0)


class OwnAcceptance:
    """How much more often than others' the model's drafts of one sequence are accepted."""

    _PRIOR, _KEPT = 4, 0.97  # accepted drafts that its likeness to others counts as; each step

    def __init__(self) -> None:
        self._right = self._expected = 0.0

    def observe(self, num_drafts: int, num_accepted: int, by_position: Sequence[float]) -> None:
        """Learn from a step; `by_position` as of all sequences. Shape: [max_k]."""
        num_tried = min(num_drafts, num_accepted + 1)
        self._right = self._KEPT * self._right + num_accepted
        self._expected = self._KEPT * self._expected + sum(by_position[:num_tried])

    @property
    def ratio(self) -> float:
        """Of its chance that a draft is accepted, if those before it are, to that of all."""
        return (self._PRIOR + self._right) / (self._PRIOR + self._expected)


class DeadDrafts:
    """Notices that a model's drafts are hardly ever accepted."""

    NUM_DRAFTS, LEAST_ACCEPTED = 2000, 0.05

    def __init__(self) -> None:
        self._num_drafts = self._num_accepted = 0
        self._is_reported = False

    def observe(self, num_drafts: int, num_accepted: int) -> bool:
        """Whether with these NUM_DRAFTS are full, of which fewer than LEAST_ACCEPTED were accepted.

        The log has the first time.
        """
        self._num_drafts += num_drafts
        self._num_accepted += num_accepted
        if self._num_drafts < self.NUM_DRAFTS:
            return False
        is_dead = self._num_accepted < self.LEAST_ACCEPTED * self._num_drafts
        if is_dead and not self._is_reported:
            self._is_reported = True
            log.warning(
                "of the last %d drafts, the target accepted %d: they only cost time. Likely "
                "causes: the draft or head was made for another release of the target; a head of a "
                "quantised target, or quantised itself (an MTP head above all); draft.head_layers "
                "names other layers than it was trained on; or its text is of another kind. Take "
                "another draft, or none (speculation.proposer)",
                self._num_drafts,
                self._num_accepted,
            )
        self._num_drafts = self._num_accepted = 0
        return is_dead


class Hits:
    """How often what one source looks up comes true, by how many tokens have agreed before it.

    At first each of those counts as a token that came true (by Laplace's rule of succession).
    """

    _PRIOR, _MOST = 8, 512  # tokens that the rule counts as, and that are remembered

    def __init__(self) -> None:
        self._right_and_tried: dict[int, tuple[float, float]] = {}

    def observe(self, num_matched: int, num_tried: int, num_right: int) -> None:
        right, tried = self._right_and_tried.get(num_matched.bit_length(), (0.0, 0.0))
        kept = 0.5 if tried > self._MOST else 1.0
        seen = kept * right + num_right, kept * tried + num_tried
        self._right_and_tried[num_matched.bit_length()] = seen

    def chance(self, num_matched: int) -> float:
        """That a token comes true, if those before it do."""
        right, tried = self._right_and_tried.get(num_matched.bit_length(), (0.0, 0.0))
        prior = (1 + num_matched) / (2 + num_matched)
        return (self._PRIOR * prior + right) / (self._PRIOR + tried)


class OwnHits:
    """The same for one sequence, the latest the most important."""

    _KEPT = 0.9  # of what was seen, from step to step

    def __init__(self) -> None:
        self._right = self._tried = 0.0

    def observe(self, num_tried: int, num_right: int) -> None:
        self._right = self._KEPT * self._right + num_right
        self._tried = self._KEPT * self._tried + num_tried

    def chance(self, num_matched: int, of_all: float) -> float:
        """`of_all` is the chance in all sequences. It counts for more the more tokens agree."""
        weight = 2 + num_matched
        return (weight * of_all + self._right) / (weight + self._tried)

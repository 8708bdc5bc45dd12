"""How often drafts are accepted: a model's by their position, looked-up ones by sequence."""

import logging
import operator
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from outrider.kernels.verify.rank import LEAST, NUM_RANGES, SURE, WIDTH

log = logging.getLogger(__name__)

PRIOR_ACCEPTANCE, PRIOR_DRAFTS = 0.7, 8  # assumed at first, and as how many drafts that counts
LIKENESS = 4  # drafts that the acceptance of the position before counts as
KEPT, KEPT_IDLE = 1 - 1 / 48, 0.99  # of what was seen: by a step with drafts, and by one without
MEAN_WEIGHT = 1 / 256  # of the latest step, in the mean ratio of sequences


class Acceptance:
    """Of a model's drafts, in all sequences.

    `by_position[j]` is the chance that draft j is accepted if those before it are, of a sequence of
    which nothing is known. Shape: [max_k].
    """

    def __init__(self, max_k: int) -> None:
        self.by_position = [PRIOR_ACCEPTANCE] * max_k
        # By position, of the drafts whose predecessors were accepted; the latest count for most.
        self._right = [PRIOR_ACCEPTANCE * PRIOR_DRAFTS] * max_k
        self._tried = [float(PRIOR_DRAFTS)] * max_k
        self._mean_ratio = 1.0
        self._of_lengths: dict[int, OwnAcceptance] = defaultdict(AlikeAcceptance)

    def of_length(self, num_tokens: int) -> "OwnAcceptance":
        """Of sequences with about so many tokens, by powers of two: a draft that was trained on
        short texts may be no good in long ones.
        """
        return self._of_lengths[num_tokens.bit_length()]

    def observe(
        self,
        wanted: Sequence[int],
        accepted: Sequence[int],
        left_out: Sequence[float] = (),
        ratios: Sequence[float] = (),
    ) -> None:
        """Learn from a step: of `wanted[i]` drafts for sequence i, `accepted[i]` were accepted.

        `left_out[i]` is how likely its next draft was, if it was made but not verified, else 0:
        where unlikely drafts are left out, the others say too much of their position. `ratios[i]`
        is its own (OwnAcceptance): where sequences differ, the good ones come to later positions.
        """
        num_seqs = len(wanted)
        left_out, ratios = left_out or (0.0,) * num_seqs, ratios or (1.0,) * num_seqs
        each = zip(wanted, accepted, left_out, ratios, strict=True)
        drafted = [one for one in each if one[0] or one[2]]
        kept, before = KEPT if drafted else KEPT_IDLE, None
        if drafted:  # Ratios are held against their mean: else chances rise while all ratios fall.
            mean = sum([ratio for *_, ratio in drafted]) / len(drafted)
            self._mean_ratio += MEAN_WEIGHT * (mean - self._mean_ratio)
        for j, (right, tried) in enumerate(zip(self._right, self._tried, strict=True)):
            kept_of_it = max(kept, min(1.0, PRIOR_DRAFTS / tried))  # its weight fades, no further
            right, tried = kept_of_it * right, kept_of_it * tried
            most = SURE / self.by_position[j]
            for num_drafts, num_accepted, chance, ratio in drafted:
                if j > num_accepted or j > num_drafts or (j == num_drafts and not chance):
                    continue
                weight = min(ratio, most) / self._mean_ratio
                right += (num_accepted > j) if j < num_drafts else chance * weight
                tried += weight
            self._right[j], self._tried[j] = right, tried
            weight = 0 if before is None else LIKENESS
            self.by_position[j] = before = (right + weight * (before or 0.0)) / (tried + weight)

    def expected(self, k: int) -> float:
        """How many of k drafts are expected to be accepted."""
        return sum(accumulate(self.by_position[:k], operator.mul), 0.0)


class Calibration:
    """How often drafts are accepted, if those before them are, by the range of the log odds of the
    likeliest token when they were drawn. At first that token's probability is taken for it.
    """

    _PRIOR, _MOST = 8, 2048  # drafts of a range that count as the prior, and that are remembered

    def __init__(self) -> None:
        middle_np = LEAST + WIDTH * (np.arange(NUM_RANGES) + 0.5)
        self._prior_np = 1 / (1 + np.exp(-middle_np))
        self._right_np, self._tried_np = np.zeros(NUM_RANGES), np.zeros(NUM_RANGES)

    @property
    def by_range_np(self) -> np.ndarray:
        """Shape: [NUM_RANGES] float32."""
        right_np = self._right_np + self._PRIOR * self._prior_np
        by_range_np: np.ndarray = (right_np / (self._tried_np + self._PRIOR)).astype(np.float32)
        return by_range_np

    def chances(self, ranges_np: np.ndarray) -> np.ndarray:
        """Of drafts by the range of their odds; 0 if they have none. Shape: [N, K] -> [N, K]."""
        return np.where(ranges_np < 0, 0.0, self.by_range_np[ranges_np])

    def observe(
        self,
        ranges_np: np.ndarray,
        verified_np: np.ndarray,
        accepted_np: np.ndarray,
        ratios_np: np.ndarray,
    ) -> None:
        """Learn from a step that verified so many drafts of each sequence, and accepted so many.

        `ratios_np` are as in Acceptance. Shape: [N, K], [N], [N], [N].
        """
        column_np = np.arange(ranges_np.shape[1])
        tried_np = (column_np < verified_np[:, None]) & (column_np <= accepted_np[:, None])
        tried_np &= ranges_np >= 0
        right_np = tried_np & (column_np < accepted_np[:, None])
        most_np = SURE / np.maximum(self.chances(ranges_np), 1e-6)
        weight_np = np.minimum(ratios_np[:, None], most_np)[tried_np]
        self._tried_np += np.bincount(ranges_np[tried_np], weight_np, NUM_RANGES)
        self._right_np += np.bincount(ranges_np[right_np], minlength=NUM_RANGES)
        kept_np = np.where(self._tried_np > self._MOST, 0.5, 1.0)
        self._tried_np *= kept_np
        self._right_np *= kept_np


class OwnAcceptance:
    """How much more often than others' the model's drafts of one sequence are accepted.

    `ratio` is that of its chance that a draft is accepted, if those before it are, to that of all.
    """

    _PRIOR, _KEPT = 4, 0.97  # accepted drafts that its likeness to others counts as; each step

    def __init__(self) -> None:
        self.ratio = 1.0
        self._right = self._expected = 0.0

    def observe(
        self, num_drafts: int, num_accepted: int, chances: Sequence[float], prior: float = 1.0
    ) -> None:
        """Learn from a step; `chances` are those of each draft, were it of any sequence. `prior` is
        the ratio of sequences that are like it.
        """
        num_tried = min(num_drafts, num_accepted + 1)
        self._right = self._KEPT * self._right + num_accepted
        self._expected = self._KEPT * self._expected + sum(chances[:num_tried])
        self.ratio = (self._PRIOR * prior + self._right) / (self._PRIOR + self._expected)


class AlikeAcceptance(OwnAcceptance):
    """The same of many sequences, which is remembered for longer."""

    _PRIOR, _KEPT = 16, 0.998


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

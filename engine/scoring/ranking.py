"""Chooses, on the device, which drafts of a step are verified."""

import numpy as np
from torch import Tensor

from outrider.kernels.verify.rank import NUM_RANGES, Ranked, rank

from ..plan import Chosen, Plan
from ..state.host_copy import uploaded
from ..state.slots import Slots


class Ranking:
    """Of all ranked sequences of a step, the likeliest drafts are verified. The host knows how many
    these are, and learns which when it reads the step.
    """

    def __init__(self, slots: Slots, log_odds: Tensor) -> None:
        """`log_odds`: as in Draws. Shape: [num_slots, K']."""
        self._log_odds = log_odds
        most = max(slots.max_num_seqs, NUM_RANGES)
        self._width = 1 << (most - 1).bit_length()

    def choose(self, plan: Plan) -> Chosen | None:
        """Within the plan's budget; all drafts must be made. None: nothing is ranked."""
        ranked, budget = plan.ranked, plan.budget
        if budget is None or not ranked:
            return None
        num_made = [s.num_made for s in ranked]
        most = min(budget.num_drafts, sum(num_made))
        counts, ranges = self._rank(
            [s.slot for s in ranked],
            num_made,
            [s.request.acceptance.ratio for s in ranked],
            budget.by_range_np,
            most,
        )
        return Chosen(most, counts, ranges)

    def warm_up(self) -> Tensor:
        """Launch the kernel, for nobody."""
        return self._rank([0], [0], [1.0], np.zeros(NUM_RANGES, dtype=np.float32), 0).counts

    def _rank(
        self,
        slots: list[int],
        num_drafts: list[int],
        ratios: list[float],
        by_range_np: np.ndarray,
        most: int,
    ) -> Ranked:
        sequences_np = np.zeros((4, self._width), dtype=np.int32)
        count, floats_np = len(slots), sequences_np.view(np.float32)
        sequences_np[0, :count], sequences_np[1, :count] = slots, num_drafts
        floats_np[2, :count], floats_np[3, :NUM_RANGES] = ratios, by_range_np
        sequences = uploaded(sequences_np, self._log_odds.device)
        return rank(sequences, count, most, self._log_odds)

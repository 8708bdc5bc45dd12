"""A choice of drafts that are ranked, whatever a step costs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.engine.acceptance import OwnAcceptance
from outrider.engine.plan import RowBudget
from outrider.engine.scheduling.adaptive_speculation import AdaptiveSpeculation


class Budgeted(AdaptiveSpeculation):
    """K drafts of each sequence, of which now these and now those are verified, whatever it costs:
    a number that follows from the drafts of the last step that was read.
    """

    def choose(self, num_seqs: int, owns: Sequence[OwnAcceptance], *_: Any, **__: Any) -> list[int]:
        self.k, most = self._max_k, self._max_k * len(owns)
        seen = 3 if self._spread_np is None else int(997 * np.square(self._spread_np).sum())
        self.budget = RowBudget(seen % (most + 1), self.calibration.by_range_np)
        return [self.k] * len(owns)

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """What steps cost is of no concern."""

"""Training rows: whole conversations, one after another, cut where the row is full."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .lessons import Lessons
from .recipe import DistillError


class TrainingRows:
    """An endless, seeded stream of rows of `row_tokens` positions in the lessons.

    Every row starts at the start of a conversation, as requests do. What is cut off at its end
    appears in another pass, at another place. There is no padding.
    """

    def __init__(self, lessons: Lessons, row_tokens: int, seed: int) -> None:
        self._lessons = lessons
        self._row_tokens = row_tokens
        self._seed = seed
        self.num_tokens = int(lessons.lengths_np.sum())
        if self.num_tokens < row_tokens:
            raise DistillError(
                f"the text has {self.num_tokens} tokens, fewer than one row of {row_tokens}; "
                "give a larger budget"
            )

    def __iter__(self) -> Iterator[Tensor]:
        """Rows, [row_tokens] int64 each."""
        starts_np, lengths_np = self._lessons.starts_np, self._lessons.lengths_np
        row: list[np.ndarray] = []
        filled = pass_number = 0
        while True:
            rng = np.random.default_rng([self._seed, pass_number])
            for i in rng.permutation(len(lengths_np)):
                row.append(np.arange(starts_np[i], starts_np[i] + lengths_np[i]))
                filled += len(row[-1])
                if filled >= self._row_tokens:
                    yield torch.from_numpy(np.concatenate(row)[: self._row_tokens])
                    row, filled = [], 0
            pass_number += 1

"""How many GPUs hold the weights of a pair. Torch is not needed here."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Share of a GPU that weights may take: the rest is for the KV cache and for steps.
_SHARE = 0.8
# What the largest step, graphs and a short context take of a GPU, whatever its size.
_STEP_BYTES = 3e9
_LEAST_EQUAL = 0.95  # memory of the smallest GPU by that of the largest


class Weights(NamedTuple):
    """Bytes of a pair's weights."""

    in_all: float
    whole: float  # draft, embedding and output layer: on the first GPU, however many share

    def of_first(self, num_gpus: int) -> float:
        """On the first of so many GPUs that share the target."""
        return self.whole + (self.in_all - self.whole) / num_gpus


def room_for_weights(
    total_bytes: float, utilization: float = 0.9, *, share: float = _SHARE
) -> float:
    """Bytes that weights may take of a GPU; `utilization` is `engine.gpu_memory_utilization`."""
    return max(0.0, min(share * total_bytes, utilization * total_bytes - _STEP_BYTES))


def most_for_weights(
    total_bytes: float, utilization: float = 0.9, *, can_share: bool = True
) -> float:
    """The same where a smaller cache is taken, since no more GPUs are there.

    A single GPU is refused only if it cannot hold the weights: the engine measures its steps.
    """
    if not can_share:
        return utilization * total_bytes
    return room_for_weights(total_bytes, utilization, share=1.0)


def fewest_gpus(weights: Weights, room_bytes: float, numbers: Iterable[int]) -> int | None:
    """The first of these numbers of GPUs that has room for the weights; None: none has."""
    return next((n for n in numbers if weights.of_first(n) <= room_bytes), None)


def are_equal(sizes: Sequence[float]) -> bool:
    """Whether GPUs with so much memory can share a target: all get shares of the same size."""
    return min(sizes) >= _LEAST_EQUAL * max(sizes)

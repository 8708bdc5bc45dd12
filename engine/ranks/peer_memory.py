"""Memory that the GPUs of all ranks read of each other, for the parts of small sums.

A rank computes its part into its own memory. Behind a barrier, the kernel that adds the parts reads
them where they lie. There are two places, used in turn: who writes to one again has passed the
barrier of the other, at which all had read the first.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.kernels.model.split_product import PeerParts

# Of a part: a larger one takes NCCL no longer. 0: NCCL takes all, as long as nobody has run this on
# GPUs; 2**21 is meant.
MOST_BYTES = 0
_SUMS, _PASSES = 0, 1  # channels of barriers


class PeerMemory:
    """One rank's end. All ranks must make the same calls in the same order."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if these GPUs cannot read each other's memory."""
        # Here, since only a system with several GPUs has to have it.
        import torch.distributed._symmetric_memory as symmetric_memory

        self._buffer = symmetric_memory.empty(2, MOST_BYTES, dtype=torch.uint8, device=device)
        world: Any = dist.group.WORLD
        self._handle = symmetric_memory.rendezvous(self._buffer, world)
        first: list[int] = [*self._handle.buffer_ptrs]
        # [2, ranks]
        self._addresses = torch.tensor(
            [first, [address + MOST_BYTES for address in first]], device=device
        )
        self._turn = 0

    def begin(self) -> None:
        """In front of a pass: places are taken in the same turns in every pass."""
        self._handle.barrier(channel=_PASSES)
        self._turn = 0

    def place(self, like: Tensor) -> Tensor | None:
        """Where this rank's next part is to be written; None if it is too large."""
        if like.nbytes > MOST_BYTES:
            return None
        self._turn = 1 - self._turn
        return self._buffer[self._turn, : like.nbytes].view(like.dtype).view(like.shape)

    def parts(self) -> PeerParts:
        """What all ranks have written to their last places, in their order."""
        self._handle.barrier(channel=_SUMS)
        return PeerParts(self._addresses[self._turn])

"""Memory that the GPUs of all ranks read of each other, for the parts of small sums.

A rank computes its part into its own memory. The kernel that adds the parts waits for the other
ranks, and reads the parts where they lie. There are two places, used in turn: who writes to one
again has added the parts of the other, and so has met ranks that had read the first.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.kernels.model.split_product import PeerParts

# Of a part: a larger one takes NCCL no longer. 0: NCCL takes all, until it is known what this
# gains. With 2**21 two H200s gave the right answers, whether by this or by NCCL.
MOST_BYTES = 0
_MOST_ROWS = 1024  # of a part


class PeerMemory:
    """One rank's end. All ranks must make the same calls in the same order."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if these GPUs cannot read each other's memory."""
        # Here, since only a system with several GPUs has to have it.
        import torch.distributed._symmetric_memory as symmetric_memory

        world: Any = dist.group.WORLD
        size = dist.get_world_size()
        self._buffer = symmetric_memory.empty(2, MOST_BYTES, dtype=torch.uint8, device=device)
        self._flags = symmetric_memory.empty(size, _MOST_ROWS, dtype=torch.int32, device=device)
        self._flags.zero_()
        self._handle = symmetric_memory.rendezvous(self._buffer, world)
        flags = symmetric_memory.rendezvous(self._flags, world)
        self._handle.barrier()  # all have cleared their flags
        first: list[int] = [*self._handle.buffer_ptrs]
        # [2, ranks]
        self._addresses = torch.tensor(
            [first, [address + MOST_BYTES for address in first]], device=device
        )
        self._flags_at = torch.tensor([*flags.buffer_ptrs], device=device)
        self._meetings = torch.zeros(_MOST_ROWS, dtype=torch.int32, device=device)
        self._turn = 0

    def begin(self) -> None:
        """In front of a pass: places are taken in the same turns in every pass."""
        self._handle.barrier()
        self._turn = 0

    def place(self, like: Tensor) -> Tensor | None:
        """Where this rank's next part is to be written; None if it is too large."""
        if like.nbytes > MOST_BYTES or len(like) > _MOST_ROWS:
            return None
        self._turn = 1 - self._turn
        return self._buffer[self._turn, : like.nbytes].view(like.dtype).view(like.shape)

    def parts(self) -> PeerParts:
        """What all ranks write to their last places, in their order."""
        addresses = self._addresses[self._turn]
        return PeerParts(addresses, self._flags_at, self._meetings, self._handle.rank)

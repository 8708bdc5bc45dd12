"""Memory that the GPUs of all ranks read of each other, for the parts of small sums.

A rank computes its part into its own memory. The kernel that adds the parts waits for the other
ranks, and reads the parts where they lie. There are two places, used in turn: who writes to one
again has added the parts of the other, and so has met ranks that had read the first.
"""

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.kernels.compiling import compile_together
from outrider.kernels.model.split_product import PeerParts, add_parts

MOST_BYTES = 1 << 22  # of a part: 256 rows of 8,192 numbers in 16 bits
_MOST_ROWS = 1024  # of a part
_MOST_TRIES = 1 << 20  # of a trial, to find another rank there: about a second


class PeerMemory:
    """One rank's end. All ranks must make the same calls in the same order.

    `connect`, `compile` and `try_out` come first; each once all ranks are done with what is before.
    """

    num_connected = 0  # in this process

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError or RuntimeError if this GPU has no memory that others can read."""
        # Here, since only a system with several GPUs has to have it.
        import torch.distributed._symmetric_memory as symmetric_memory

        if os.environ.get("NCCL_P2P_DISABLE") == "1":
            raise RuntimeError("NCCL_P2P_DISABLE is set")
        self._size, self._rank = dist.get_world_size(), dist.get_rank()
        self._rendezvous = symmetric_memory.rendezvous
        self._buffer = symmetric_memory.empty(2, MOST_BYTES, dtype=torch.uint8, device=device)
        shape = self._size, _MOST_ROWS
        self._flags = symmetric_memory.empty(*shape, dtype=torch.int32, device=device).zero_()
        self._meetings = torch.zeros(_MOST_ROWS, dtype=torch.int32, device=device)
        self._turn = 0

    def connect(self) -> None:
        """Raises RuntimeError if this GPU cannot read that of the others."""
        PeerMemory.num_connected += 1
        world: Any = dist.group.WORLD
        self._handle = self._rendezvous(self._buffer, world)
        first: list[int] = [*self._handle.buffer_ptrs]
        # [2, ranks]
        self._addresses = torch.tensor(
            [first, [address + MOST_BYTES for address in first]], device=self._buffer.device
        )
        flags = self._rendezvous(self._flags, world)
        self._flags_at = torch.tensor([*flags.buffer_ptrs], device=self._buffer.device)

    def compile(self) -> None:
        """Compile what `try_out` launches: no rank waits for another's compiler."""
        like = torch.zeros(1, 64, device=self._buffer.device)
        parts = self.parts()._replace(most_tries=_MOST_TRIES)
        compile_together([functools.partial(add_parts, like, parts, None)], like.device)

    def try_out(self) -> None:
        """Add parts of all ranks twice. Raises RuntimeError if sums are wrong, or one is missing.

        Nothing waits for ever here, whatever these GPUs make of memory that they share.
        """
        numbers = torch.arange(64.0, device=self._buffer.device)[None]
        of_ranks, is_right = range(self._size), True
        for turn in range(2):
            place = self.place(numbers)
            assert place is not None
            place.copy_(numbers * (1 + self._rank) + turn)
            total = torch.zeros_like(numbers)
            add_parts(total, self.parts()._replace(most_tries=_MOST_TRIES), None)
            parts = torch.stack([numbers * (1 + rank) + turn for rank in of_ranks])
            is_right &= torch.equal(total, parts.sum(0))
        met = [self._flags[rank, 0] == 2 for rank in of_ranks if rank != self._rank]
        if not bool(torch.stack(met).all()):
            raise RuntimeError("what one GPU writes to another does not come there")
        if not is_right:
            raise RuntimeError("sums of what lies on several GPUs are wrong")

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
        return PeerParts(addresses, self._flags_at, self._meetings, self._rank)

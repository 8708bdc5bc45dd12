"""What the ranks of a target exchange on their devices.

NCCL between GPUs, gloo between CPUs. All calls go to torch's current stream, so that graphs capture
them; all ranks must make the same calls in the same order.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_torch_dist: Any = dist
# One name before torch 2.13, the other since.
_gather = getattr(dist, "all_gather_single", None) or _torch_dist.all_gather_into_tensor


def path_of(fd: int) -> str:
    """Of a file that this process has open; to open it by that again locks apart."""
    return f"/proc/self/fd/{fd}"


class Group:
    """One rank's end. Before `join`, and in `apart`, it exchanges nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.is_apart = True

    def join(self, meeting_point: str, device: torch.device) -> None:
        """Meet the other ranks over a file, which all of them have open."""
        # All ranks are on this machine, whatever its name resolves to.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=_torch_dist.FileStore(meeting_point, self.size),
            rank=self.rank,
            world_size=self.size,
        )
        self.is_apart = False
        # The first call connects, which a graph cannot capture.
        self.broadcast(torch.zeros(1, device=device))
        self.gather(torch.zeros(1, 1, device=device))

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self.is_apart = True

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, this rank computes without the others, whose parts are its own."""
        before, self.is_apart = self.is_apart, True
        try:
            yield
        finally:
            self.is_apart = before

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's x replaces that of the others, in place."""
        if not self.is_apart:
            dist.broadcast(x, 0)

    def gather(self, x: Tensor) -> Tensor:
        """The x of all ranks, in their order. Shape: [T, N] -> [size, T, N]."""
        num_rows, width = x.shape
        if self.is_apart:
            return x.repeat(self.size, 1, 1)
        parts = x.new_empty(self.size * num_rows, width)
        _gather(parts, x)
        return parts.view(self.size, num_rows, width)

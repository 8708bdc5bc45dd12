"""What the ranks of a target exchange on their devices.

NCCL between GPUs, gloo between CPUs. All calls go to torch's current stream, so that graphs capture
them; all ranks must make the same calls in the same order.
"""

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.kernels.model.split_product import PeerParts, add_parts

from ..state.phase import Phase
from .peer_memory import MOST_BYTES, PeerMemory

log = logging.getLogger(__name__)

_torch_dist: Any = dist
# One name before torch 2.13, the other since.
_gather = getattr(dist, "all_gather_single", None) or _torch_dist.all_gather_into_tensor
# Private up to torch 2.13.
_abort = (
    getattr(dist, "abort_process_group", None) or _torch_dist.distributed_c10d._abort_process_group
)


def path_of(fd: int) -> str:
    """Of a file that this process has open; to open it by that again locks apart."""
    return f"/proc/self/fd/{fd}"


class RankGroup:
    """One rank's end. Before `join`, and in `apart`, it exchanges nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.is_apart = True
        self._has_joined = self._on_gpu = False
        self._peers: PeerMemory | None = None
        self._phases: weakref.WeakSet[Phase[Any]] = weakref.WeakSet()  # whose graphs exchange

    def join(self, meeting_point: str, device: torch.device) -> None:
        """Meet the other ranks over a file, which all of them have open."""
        # All ranks are on this machine, whatever its name resolves to.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        # A program that dies while it uses NVLink's multicast may leave the host without its GPUs.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._on_gpu = on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=_torch_dist.FileStore(meeting_point, self.size),
            rank=self.rank,
            world_size=self.size,
        )
        self._has_joined = True
        self.is_apart = False
        # The first call connects, which a graph cannot capture.
        self.broadcast(torch.zeros(1, device=device))
        self.gather(torch.zeros(1, 1, device=device))
        if on_gpu and MOST_BYTES > 0:
            self._peers = self._meet_peers(device)

    def _meet_peers(self, device: torch.device) -> PeerMemory | None:
        """Memory that the GPUs share, if an exchange over it gives all ranks the right sum."""
        try:
            peers = PeerMemory(device)
        except RuntimeError as error:
            log.info("GPUs cannot read each other's memory: %s", error)
            peers = None
        own = torch.arange(64.0, device=device).add_(self.rank)[None]
        is_right = False
        # A rank that has none would keep the others waiting at a barrier.
        if self._all_say(peers is not None, own):
            assert peers is not None
            peers.begin()
            place = peers.place(own)
            assert place is not None
            place.copy_(own)
            total = torch.zeros_like(own)
            add_parts(total, peers.parts(), None)
            is_right = self._all_say(torch.equal(total, self.gather(own).sum(0)), own)
        log.info("GPUs read small parts of sums %s", "of each other" if is_right else "by NCCL")
        return peers if is_right else None

    def _all_say(self, answer: bool, like: Tensor) -> bool:
        return bool(self.gather(like.new_full((1, 1), answer)).all())

    def exchanges_in(self, phase: Phase[Any]) -> None:
        """The graphs of this phase are dropped when the rank leaves the group."""
        self._phases.add(phase)

    def finish(self) -> None:
        """Wait for what this rank has launched on a GPU, while the others still live."""
        if self._has_joined and self._on_gpu:
            with contextlib.suppress(RuntimeError):  # of a step that has failed
                torch.cuda.synchronize()

    def leave(self) -> None:
        """Whether or not the other ranks still live."""
        self.is_apart = True
        if not self._has_joined:
            return
        self._has_joined = False
        # NCCL waits until no graph holds a call of it, for ever.
        for phase in self._phases:
            phase.drop()
        self._peers = None
        if self._on_gpu:  # to destroy the group is a call that NCCL wants of all ranks
            _abort()
        else:
            dist.destroy_process_group()

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

    def begin_pass(self) -> None:
        """In front of the sums of a pass."""
        if self._peers is not None and not self.is_apart:
            self._peers.begin()

    def parts(self, like: Tensor, compute: Callable[[Tensor | None], Tensor]) -> Tensor | PeerParts:
        """The parts of a sum that all ranks compute, in their order.

        `compute` returns this rank's, and writes it to the place that it is given, if there is one.
        Either way the parts have the same bits. Shape: [T, N], as `like`
        """
        place = None if self._peers is None or self.is_apart else self._peers.place(like)
        if self._peers is None or place is None:
            return self.gather(compute(None))
        compute(place)
        return self._peers.parts()

    def gather(self, x: Tensor) -> Tensor:
        """The x of all ranks, in their order. Shape: [T, N] -> [size, T, N]."""
        num_rows, width = x.shape
        if self.is_apart:
            return x.repeat(self.size, 1, 1)
        parts = x.new_empty(self.size * num_rows, width)
        _gather(parts, x)
        return parts.view(self.size, num_rows, width)

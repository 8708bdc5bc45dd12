"""What the ranks of a target exchange on their devices.

NCCL between GPUs, gloo between CPUs. All calls go to torch's current stream, so that graphs capture
them; all ranks must make the same calls in the same order.
"""

import contextlib
import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.kernels.model.split_product import PeerParts

from ..state.phase import Phase
from .peer_memory import MOST_BYTES, PeerMemory

log = logging.getLogger(__name__)

_MOST_REASON = 400  # bytes
# For ranks to say where their memory is. All are there by then; one that fails says nothing.
_CONNECTS_WITHIN = timedelta(seconds=30)

_torch_dist: Any = dist
# One name before torch 2.13, the other since.
_gather = getattr(dist, "all_gather_single", None) or _torch_dist.all_gather_into_tensor
# Private in torch 2.13 still; all that is public is a call that NCCL wants of all ranks.
_abort = _torch_dist.distributed_c10d._abort_process_group


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
        store = _torch_dist.FileStore(meeting_point, self.size)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=self.rank, world_size=self.size
        )
        self._has_joined = True
        self.is_apart = False
        # The first call connects, which a graph cannot capture.
        self.broadcast(torch.zeros(1, device=device))
        self.gather(torch.zeros(1, 1, device=device))
        if on_gpu:
            store.set_timeout(_CONNECTS_WITHIN)
            self._meet_peers(device)

    def _meet_peers(self, device: torch.device) -> None:
        """Take memory that the GPUs share, if sums over it are right on all ranks."""

        def allocate() -> None:
            self._peers = PeerMemory(device)  # here, so that `finish` finds it if a step fails

        def peers() -> PeerMemory:
            assert self._peers is not None
            return self._peers

        steps: tuple[Callable[[], None], ...] = (
            lambda: self._check_connections(device),
            allocate,
            lambda: peers().connect(),
            lambda: peers().compile(),
            lambda: peers().try_out(),
        )
        # A rank that fails would keep the others waiting in the next step.
        reason = next(filter(None, (self._why_not(step, device) for step in steps)), "")
        if reason:
            self._peers = None
            log.info("ranks exchange all parts of sums by NCCL (%s)", reason)
        else:
            log.info(
                "ranks read parts of sums of up to %d bytes in each other's memory", MOST_BYTES
            )

    def _check_connections(self, device: torch.device) -> None:
        """Raises RuntimeError on all ranks if torch would number those of some otherwise, by what
        their processes did before: they would wait for each other.
        """
        numbers = self.gather(torch.full((1, 1), PeerMemory.num_connected, device=device))
        if not torch.equal(numbers.min(), numbers.max()):
            raise RuntimeError("an engine before this one, in one process, had shared memory")

    def _why_not(self, step: Callable[[], None], device: torch.device) -> str:
        """Take a step that may fail on some rank; says on which, and why, if it did."""
        reason = ""
        try:
            step()
        except Exception as error:  # of torch, the driver or the compiler
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        own = torch.zeros(1, _MOST_REASON, dtype=torch.uint8)
        written = list(reason.encode()[:_MOST_REASON])
        own[0, : len(written)] = torch.tensor(written, dtype=torch.uint8)
        try:
            of_ranks = self.gather(own.to(device)).tolist()
        except RuntimeError as error:  # some errors of a GPU stay until its process ends
            raise RuntimeError(
                f"a GPU failed when it tried the memory of the others ({reason or error}); set "
                "NCCL_P2P_DISABLE=1 to do without"
            ) from error
        for rank, [row] in enumerate(of_ranks):
            if text := bytes(row).rstrip(b"\0").decode(errors="replace"):
                return f"rank {rank}: {text}"
        return ""

    def exchanges_in(self, phase: Phase[Any]) -> None:
        """The graphs of this phase are dropped when the rank leaves the group."""
        self._phases.add(phase)

    def finish(self) -> None:
        """Wait for what this rank has launched on a GPU, so that peers' memory can be freed.

        To free it waits as well, but keeps the GIL: while a pass waits for a lost rank, for ever,
        no thread could end this process. And it aborts the process if the GPU has failed.
        """
        if self._has_joined and self._on_gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # of a step that has failed
                # Never freed, at the interpreter's end either.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._peers))

    def leave(self) -> None:
        """Whether or not the other ranks still live; `finish` comes first."""
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
        """Inside, this rank computes without the others, whose parts are its own; on a GPU it only
        compiles: a kernel that adds parts of peers would wait for them.
        """
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
        Either way the parts of a batch-invariant layer have the same bits. Shape: [T, N], as `like`
        """
        place = None if self._peers is None else self._peers.place(like)
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

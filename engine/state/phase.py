"""The phases of a step on the device: run directly, or replayed as CUDA graphs.

A phase is a function of one small integer array and of tensors that never move. So one copy and one
launch replay its graph, which costs the host microseconds instead of milliseconds. On a CPU, and
for shapes that were not captured, the same function runs directly.
"""

import functools
import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import ge
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..gpu_memory import is_full
from .host_copy import staged, uploaded

log = logging.getLogger(__name__)

Shape = tuple[int, ...]
Output = TypeVar("Output")
_Body = Callable[..., Output]  # (integers, shape, *tensors) -> output


@dataclass(slots=True)
class Captured(Generic[Output]):
    """The graph of one shape, with what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    integers: Tensor
    tensors: tuple[Tensor, ...]
    output: Output  # overwritten by every replay


class Phase(Generic[Output]):
    """`body(integers, shape, *tensors)`; `shape` must determine the sizes of all its tensors."""

    def __init__(
        self, body: _Body[Output], device: torch.device, *, needs_all_graphs: bool = False
    ) -> None:
        """`needs_all_graphs`: raise torch.OutOfMemoryError if there is no memory for one. Otherwise
        its shape runs directly, as if it were not captured.
        """
        self._body = body
        self._device = device
        self._needs_all_graphs = needs_all_graphs
        self._lacks_graphs = False
        self.captured: dict[Shape, Captured[Output]] = {}
        self._prepared: set[Shape] = set()  # captured before, perhaps over other tensors
        self._ascending: list[Shape] = []  # the captured ones

    def __call__(self, integers: np.ndarray | Tensor, shape: Shape, *tensors: Tensor) -> Output:
        """Run on these integers, of the host or on the device; the output is valid until the next
        call.

        For a captured shape, `tensors` may have fewer rows than those it was captured with.
        """
        captured = self.captured.get(shape)
        if captured is None:
            if isinstance(integers, np.ndarray):
                integers = uploaded(integers, self._device)
            return self._body(integers, shape, *tensors)
        if len(integers):
            if isinstance(integers, np.ndarray):
                integers = staged(torch.from_numpy(integers), self._device)
            captured.integers.copy_(integers, non_blocking=True)
        for given, fixed in zip(tensors, captured.tensors, strict=True):
            if given.data_ptr() != fixed.data_ptr():
                fixed[: len(given)].copy_(given)
        captured.graph.replay()
        return captured.output

    def drop(self) -> None:
        """Drop what is captured, because the tensors that it reads are replaced."""
        self.captured, self._ascending = {}, []

    def holds(self, shape: Shape, num_rows: int) -> bool:
        """Whether a shape was captured over tensors of so many rows at least."""
        captured = self.captured.get(shape)
        return captured is not None and all(len(each) >= num_rows for each in captured.tensors)

    def padded(self, wanted: Shape) -> Shape:
        """The smallest captured shape with no smaller number than `wanted`; else `wanted` itself.

        Whatever numbers `wanted` lacks may be any. Every pass asks: so it is not compared with all
        that are for fewer sequences.
        """
        first = bisect_left(self._ascending, wanted[:1])
        larger = islice(self._ascending, first, None)
        return next((shape for shape in larger if all(map(ge, shape, wanted))), wanted)

    @torch.inference_mode()
    def capture(
        self, integers_np: np.ndarray, shape: Shape, tensors: Sequence[Tensor] = ()
    ) -> None:
        """Capture a shape, running on the given integers, unless there is no memory for it.

        Capture the largest shape first: the others share its memory.
        """
        try:
            integers = torch.from_numpy(integers_np).to(self._device)
            pool = next((c.graph.pool() for c in self.captured.values()), None)
            is_prepared = shape in self._prepared
            graph, output = record_graph(
                lambda: self._body(integers, shape, *tensors), pool, is_prepared=is_prepared
            )
        except RuntimeError as error:
            if not is_full(error):
                raise
            if self._needs_all_graphs:
                raise torch.OutOfMemoryError(str(error)) from error
        else:
            self._prepared.add(shape)
            self.captured[shape] = Captured(graph, integers, tuple(tensors), output)
            self._ascending = sorted(self.captured)
            return
        # Behind the handler, whose error holds what the failed pass allocated.
        self._give_up(shape)

    def _give_up(self, shape: Shape) -> None:
        torch.cuda.empty_cache()
        if not self._lacks_graphs:
            log.warning(
                "no memory for the CUDA graph of %s, and perhaps for others: such steps take the "
                "host longer; lower scheduler.max_num_seqs or scheduler.max_num_batched_tokens",
                shape,
            )
        self._lacks_graphs = True


def record_graph(
    run: Callable[[], Output], pool: Any, *, is_prepared: bool = False
) -> tuple[torch.cuda.CUDAGraph, Output]:
    """A graph that does what `run` does, with memory from `pool`, and the output it writes to.

    `is_prepared`: the same was recorded before, so that its kernels are loaded.
    """
    stream = _capture_stream(torch.cuda.current_device())
    if not is_prepared:  # first uncaptured: loads kernels and makes handles
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The outer stream is that of now: a capture whose end fails would leave its own in place.
    now = torch.cuda.stream(torch.cuda.current_stream())
    with _uncollected(), now, torch.cuda.graph(graph, pool=pool, stream=stream):
        output = run()
    return graph, output


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: freeing an old engine's graphs during a capture would break it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all graphs of a GPU, so that they can share memory.

    Not torch's default capture stream, which belongs to a single GPU.
    """
    return torch.cuda.Stream(device)


def padded_sizes(most: int) -> list[int]:
    """Sizes to capture for 1..most: `most` itself, then the powers of two below it, falling."""
    return [most, *(2**i for i in reversed(range((most - 1).bit_length())))]

"""The phases of a step on the device: run as they are, or replayed as CUDA graphs.

A phase is a function of one small array of integers and of tensors that never move, so that one
copy and one launch start it. Captured, it costs the host microseconds instead of milliseconds. The
same function runs uncaptured on a CPU, and for whatever fits no captured shape.
"""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from .host_copy import staged, uploaded

Shape = tuple[int, ...]
Output = TypeVar("Output")
Body = Callable[..., Output]  # (integers, shape, *tensors) -> output


@dataclass(slots=True)
class _Captured(Generic[Output]):
    graph: torch.cuda.CUDAGraph
    integers: Tensor
    tensors: tuple[Tensor, ...]
    output: Output  # overwritten by every replay


class Phase(Generic[Output]):
    """`body(integers, shape, *tensors)`, by shape: all that sets the sizes of its tensors."""

    def __init__(self, body: Body[Output], device: torch.device) -> None:
        self._body = body
        self._device = device
        self._captured: dict[Shape, _Captured[Output]] = {}

    def __call__(self, integers_np: np.ndarray, shape: Shape, *tensors: Tensor) -> Output:
        """Run on these integers. Of a captured shape the leading dimension of `tensors` may fall
        short; the output stays valid until the next call.
        """
        captured = self._captured.get(shape)
        if captured is None:
            return self._body(uploaded(integers_np, self._device), shape, *tensors)
        integers = staged(torch.from_numpy(integers_np), self._device)
        captured.integers.copy_(integers, non_blocking=True)
        for given, fixed in zip(tensors, captured.tensors, strict=True):
            if given.data_ptr() != fixed.data_ptr():
                fixed[: len(given)].copy_(given)
        captured.graph.replay()
        return captured.output

    @torch.inference_mode()
    def capture(
        self, integers_np: np.ndarray, shape: Shape, tensors: Sequence[Tensor] = ()
    ) -> Output:
        """Capture a shape, on integers that are safe to run on; returns the output's place.

        The largest shape goes first: its memory serves the others.
        """
        integers = torch.from_numpy(integers_np).to(self._device)
        pool = next((c.graph.pool() for c in self._captured.values()), None)
        graph, output = record_graph(lambda: self._body(integers, shape, *tensors), pool)
        self._captured[shape] = _Captured(graph, integers, tuple(tensors), output)
        return output


def record_graph(run: Callable[[], Output], pool: Any) -> tuple[torch.cuda.CUDAGraph, Output]:
    """A graph that does what `run` does, its memory from `pool`, and where its output lies."""
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles kernels and makes handles, uncaptured
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _uncollected(), torch.cuda.graph(graph, pool=pool, stream=stream):
        output = run()
    return graph, output


@contextmanager
def _uncollected() -> Iterator[None]:
    """Graphs of an engine that is gone, collected in the midst of a capture, would break it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all graphs, which share memory within a stream; torch's own is that of one GPU."""
    return torch.cuda.Stream(device)


def padded_sizes(most: int) -> list[int]:
    """Sizes to capture for 1..most: the powers of two and `most` itself, the largest first."""
    return [most, *(2**i for i in reversed(range((most - 1).bit_length())))]


def padded_size(size: int, captured: list[int]) -> int:
    """The first of these (ascending) that holds `size`, or itself: nothing is captured for it."""
    return next((n for n in captured if n >= size), size)

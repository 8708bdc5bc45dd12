"""Captures without a GPU, of which every process counts how often the host runs a pass."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock, patch

import torch

from outrider.engine.state import phase


class NoGraph:
    """In place of a CUDA graph; it cannot be replayed."""

    def pool(self) -> int:
        return 1


@contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, what is captured runs as often as on a GPU, and graphs record nothing."""
    with (
        patch.object(phase, "_capture_stream", lambda _: MagicMock()),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "current_stream", MagicMock()),
        patch.object(torch.cuda, "stream", lambda _: nullcontext()),
        patch.object(torch.cuda, "CUDAGraph", NoGraph),
        patch.object(torch.cuda, "graph", lambda *_, **__: nullcontext()),
    ):
        yield

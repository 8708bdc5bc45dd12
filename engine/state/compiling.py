"""Kernels that take a second and more to compile, compiled side by side."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

_THREADS = 16


def compile_together(warm_ups: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Call each on a thread: while Triton compiles for one, others can go on most of the time.

    They must be safe beside each other. What one raises is raised.
    """

    @torch.inference_mode()
    def call(warm_up: Callable[[], object]) -> None:
        with torch.cuda.device(device):  # Triton launches on the thread's current device
            warm_up()

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(call, warm_ups))

"""Compiles slow kernels in parallel."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

_THREADS = 16


def compile_together(warm_ups: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Call each on a thread of its own; while Triton compiles for one, the others mostly go on.

    They must be safe to run at the same time. Raises what any of them raises.
    """

    @torch.inference_mode()
    def call(warm_up: Callable[[], object]) -> None:
        with torch.cuda.device(device):  # Triton launches on the thread's current device
            warm_up()

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(call, warm_ups))

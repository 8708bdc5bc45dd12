"""Compiles kernels in parallel."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from typing import Any

import torch

from .triton_or_none import triton

_THREADS = 16


class CompileMode(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode for asynchronous compiling, made safe for launches by several threads.

    Triton's own `submit` looks for a kernel and adds it without a lock, so threads that launch the
    same kernel at the same moment would all compile it. And it leaves loading a kernel to its first
    launch. Triton 3.6 loads the code that launches it as a Python module, of one name for all
    kernels: of two threads that load at the same moment, one may get the other's code.
    """

    def __init__(self, compilers: Executor) -> None:
        super().__init__(compilers)
        self._submitting, self._loading = Lock(), Lock()

    def submit(
        self, key: Any, compile_kernel: Callable[[], Any], finalize: Callable[[Any], object]
    ) -> Any:
        def compile_and_load() -> Any:
            kernel = compile_kernel()
            with self._loading:
                kernel.run  # noqa: B018 - loads the kernel
            return kernel

        with self._submitting:
            return super().submit(key, compile_and_load, finalize)


def compile_together(warm_ups: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Call each on a thread of its own. Kernels are compiled on other threads, and only once if
    several calls launch the same one. On a CPU nothing is compiled, and nothing called.

    The calls must be safe to run at the same time. Raises what any of them raises.
    """
    if device.type == "cpu":
        return

    @torch.inference_mode()
    def call(warm_up: Callable[[], object]) -> None:
        with torch.cuda.device(device):  # Triton launches on the thread's current device
            warm_up()

    with torch.cuda.device(device):
        index = torch.cuda.current_device()  # where compilers load kernels
    with (
        ThreadPoolExecutor(_THREADS, "compile", torch.cuda.set_device, (index,)) as compilers,
        CompileMode(compilers),  # of this context, which each thread gets a copy of
        ThreadPoolExecutor(len(warm_ups)) as threads,
    ):
        calls = [threads.submit(copy_context().run, call, warm_up) for warm_up in warm_ups]
        for each in calls:
            each.result()

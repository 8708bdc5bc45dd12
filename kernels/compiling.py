"""Compiles kernels in parallel, before anything waits for one."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .reached import check_reached
from .triton_or_none import triton

if hasattr(triton, "runtime"):  # else it is a stand-in, and nothing is compiled
    check_reached("triton", triton, "AsyncCompileMode")
    check_reached("triton", triton.JITFunction, "run")
    check_reached("triton", triton.runtime.build, "_load_module_from_path")
    check_reached("triton", triton.knobs.cache, "dir")

_THREADS = 16
_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


@torch.inference_mode()
def compile_together(warm_ups: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compile the kernels that these calls launch, all at the same time; those that take longest
    should come first. On a CPU nothing is compiled, and nothing called.

    No kernel runs, so the calls get zeros where kernels would have written. What else they do is
    done. Raises what any of them raises.
    """
    if device.type == "cpu":
        return
    with (
        compiling_alone(Path(triton.knobs.cache.dir)),
        torch.cuda.device(device),
        launches_compile_only(),  # until the mode, which waits for all kernels, has ended
        ThreadPoolExecutor(
            _THREADS, "compile", torch.cuda.set_device, (torch.cuda.current_device(),)
        ) as compilers,
        CompileMode(compilers),
        EmptyIsZero(),
    ):
        for warm_up in warm_ups:
            warm_up()


@contextmanager
def compiling_alone(cache: Path) -> Iterator[None]:
    """Inside, no other process compiles into this cache: the ranks of a model need the same
    kernels, and whoever comes second finds them.

    Where files cannot be locked, all compile at once.
    """
    import fcntl  # here, since Windows, where nothing is compiled, has none

    with ExitStack() as held:
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context((cache / "outrider.lock").open("w")), fcntl.LOCK_EX)
        yield


class CompileMode(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode for asynchronous compiling, which also loads what it compiles: Triton leaves
    that to the first launch.
    """

    def submit(
        self, key: Any, compile_kernel: Callable[[], Any], finalize: Callable[[Any], object]
    ) -> Any:
        def compile_and_load() -> Any:
            kernel = compile_kernel()
            kernel.run  # noqa: B018 - loads the kernel
            return kernel

        future = super().submit(key, compile_and_load, finalize)
        finalize(future)  # the next launch finds it without hashing the source again
        return future


@contextmanager
def launches_compile_only() -> Iterator[None]:
    """Inside, launching a kernel compiles it at most."""
    launching, build = triton.JITFunction, triton.runtime.build
    run, load, loading = launching.run, build._load_module_from_path, Lock()

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, warmup=True, **options)

    # Triton 3.6 launches each kernel from a Python module of its own, and all have one name: of two
    # threads that load one at the same moment, one may get the other's.
    def load_alone(name: str, path: str) -> Any:
        with loading:
            return load(name, path)

    launching.run, build._load_module_from_path = compile_only, load_alone
    try:
        yield
    finally:
        launching.run, build._load_module_from_path = run, load


class EmptyIsZero(TorchDispatchMode):
    """Zeroes new tensors: what a kernel would have written may be used as an index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _EMPTY else made

"""Kernels are compiled on threads, each once."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Lock

import pytest
import torch
from verification import DEVICE

from outrider.kernels.compiling import CompileMode, compile_together
from outrider.kernels.triton_or_none import tl, triton


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_what_a_thread_raises_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_together([lambda: None, fail], DEVICE)


class FakeKernel:
    """Is loaded when its `run` is read for the first time, as Triton's kernels are."""

    loading = Lock()

    def __init__(self) -> None:
        self.is_loaded = False

    @property
    def run(self) -> None:
        assert self.loading.acquire(blocking=False), "two kernels are loaded at the same moment"
        time.sleep(1e-3)
        self.is_loaded = True
        self.loading.release()


def test_a_kernel_is_loaded_before_threads_launch_it_and_never_two_at_once() -> None:
    with ThreadPoolExecutor(8) as compilers:
        mode = CompileMode(compilers)
        futures = [mode.submit(key, FakeKernel, lambda _: None) for key in range(16)]
        assert all(future.is_loaded for future in futures)


def test_a_kernel_that_threads_submit_at_the_same_moment_is_compiled_once() -> None:
    before_s = sys.getswitchinterval()
    compiled: list[int] = []

    def compile_kernel(key: int) -> FakeKernel:
        compiled.append(key)
        return FakeKernel()

    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as compilers, ThreadPoolExecutor(8) as threads:
            mode = CompileMode(compilers)
            for key in range(50):
                at_once = Barrier(8)

                def launch(key: int = key, at_once: Barrier = at_once) -> None:
                    at_once.wait()
                    mode.submit(key, partial(compile_kernel, key), print)

                for done in [threads.submit(launch) for _ in range(8)]:
                    done.result()
    finally:
        sys.setswitchinterval(before_s)
    assert sorted(compiled) == list(range(50))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_a_kernel_that_many_threads_launch_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name)
    )
    x = torch.zeros(8, device=DEVICE)
    compile_together([lambda: _add_one[(1,)](x)] * 8, DEVICE)
    assert compiled == ["_add_one"]
    assert x[0] == 8


@triton.jit
def _add_one(x_ptr):  # type: ignore[no-untyped-def]
    tl.atomic_add(x_ptr, 1.0)

"""Kernels are compiled on threads, each once."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

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


def test_a_kernel_that_threads_submit_at_the_same_moment_is_compiled_once() -> None:
    before_s = sys.getswitchinterval()
    compiled: list[int] = []
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as compilers, ThreadPoolExecutor(8) as threads:
            mode = CompileMode(compilers)
            for key in range(50):
                at_once = Barrier(8)

                def launch(key: int = key, at_once: Barrier = at_once) -> None:
                    at_once.wait()
                    mode.submit(key, partial(compiled.append, key), print)

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

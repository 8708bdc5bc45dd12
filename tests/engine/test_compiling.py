"""Kernels are compiled by another process, before they are launched."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import engine_config
from tiny_models import DEVICE

from outrider.engine.engine import Engine
from outrider.engine.state import compiling
from outrider.engine.state.compiling import Compilers, compile_ahead
from outrider.engine.state.slots import Slots
from outrider.kernels import _dispatch
from outrider.kernels.model.product import _product_kernel, product
from outrider.kernels.model.rms_norm import Norm, _rms_norm_kernel, rms_norm
from outrider.kernels.verify.slot_rows import _read_slots_kernel, read_slots

_KERNELS = (_rms_norm_kernel, _product_kernel, _read_slots_kernel)  # the last takes named tuples

without_gpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="pretends that there is a GPU")


@pytest.mark.parametrize("proposer", ["draft_model", "ngram"])
def test_a_rehearsal_touches_no_sequence(tiny_model: Callable[..., Path], proposer: str) -> None:
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, target, k=2, proposer=proposer, max_num_seqs=2))
    state = engine.worker.slots.state
    state.token_ids.random_(90)
    state.num_tokens.random_(9)
    before = [field[:2].clone() for field in (state.token_ids, state.num_tokens)]
    engine.worker.rehearse()
    assert torch.equal(before[0], state.token_ids[:2])
    assert torch.equal(before[1], state.num_tokens[:2])


class _NoLauncher:
    """Launches nothing; Triton makes one for each kernel."""

    __module__, __qualname__ = "builtins", "len"  # which fails for a kernel, as it may


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compilers]:
    """For a GPU that is not there: kernels are launched on the CPU's tensors, but never run."""
    triton = pytest.importorskip("triton")
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        launcher_cls=_NoLauncher,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = Compilers(lambda stage, done, total: None)
    yield made
    made.close()
    for kernel in _KERNELS:
        kernel.device_caches.clear()


def _launch() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    rms_norm(x, Norm(torch.ones(64, dtype=torch.bfloat16), 1e-5))


@without_gpu
def test_a_launch_finds_what_the_process_compiled(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    def call() -> None:
        _launch()
        x = torch.zeros(17, 64, dtype=torch.bfloat16)
        product(x, torch.zeros(64, 64, dtype=torch.bfloat16), None)
        slots = Slots(2, 64, 2, 16, torch.device("cpu"), "token")
        read_slots(slots.state, torch.zeros(2, dtype=torch.int64), 1)

    compilers.compile(call)
    hits: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        triton.knobs.compilation,
        "listener",
        lambda *, src, cache_hit, **_: hits.append((src.name, cache_hit)),
    )
    run = triton.JITFunction.run
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda *args, **kw: run(*args, **kw | {"warmup": True})
    )
    call()
    assert hits == [(kernel.__name__, True) for kernel in _KERNELS]


@without_gpu
def test_without_the_process_nothing_breaks(compilers: Compilers) -> None:
    import triton

    compilers._process.kill()
    compilers._process.wait()
    compilers.compile(_launch)
    assert triton.knobs.runtime.jit_cache_hook is None


@without_gpu
def test_a_call_that_fails_leaves_nothing_behind(compilers: Compilers) -> None:
    import triton

    def call() -> None:
        _launch()
        raise RuntimeError("no such index")

    compilers.compile(call)
    assert triton.knobs.runtime.jit_cache_hook is None
    assert compiling._Skipped not in _rms_norm_kernel.device_caches[0][0].values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float8_e4m3fn])
def test_what_no_kernel_wrote_is_zero(dtype: torch.dtype) -> None:
    old = torch.ones(1000).to(dtype)
    with compiling._Zeros():  # type: ignore[no-untyped-call]
        for make in (
            lambda: torch.empty(1000, dtype=dtype),
            lambda: torch.empty_like(old),
            lambda: old.new_empty(1000),
            lambda: torch.empty_strided((10, 100), (100, 1), dtype=dtype),
        ):
            _ = torch.full((1000,), 3.0).to(dtype)  # whose memory may be taken next
            assert not make().float().any()


def test_on_a_cpu_nothing_is_called_ahead() -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("called")

    with compiling.compiling_ahead(torch.device("cpu"), fail):
        compile_ahead(fail)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_a_first_start_finds_its_kernels_compiled(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton

    target = tiny_model("llama", seed=0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hits: list[bool] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)
    )
    # No other test has such pages, so that attention's kernels are in no memory.
    Engine(engine_config(target, target, k=2, max_num_seqs=2, page_size=64))
    assert hits
    assert hits.count(False) <= len(hits) // 10

"""Kernels are compiled in parallel, each once, and none of them runs."""

import fcntl
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from verification import DEVICE

from outrider.kernels._dispatch import num_stages_of, shared_bytes
from outrider.kernels.compiling import (
    CompileMode,
    compile_together,
    compiling_alone,
    launches_compile_only,
)
from outrider.kernels.model import few_outputs_product, product
from outrider.kernels.model.batch_invariant_linear import own_products
from outrider.kernels.triton_or_none import tl, triton

needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
def test_what_a_call_raises_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_together([lambda: None, fail], DEVICE)


class FakeKernel:
    """Is loaded when its `run` is read for the first time, as Triton's kernels are."""

    def __init__(self) -> None:
        self.is_loaded = False

    @property
    def run(self) -> None:
        self.is_loaded = True


def test_a_compiled_kernel_is_loaded_too_and_launches_find_it_at_once() -> None:
    found: list[Any] = []
    with ThreadPoolExecutor(8) as compilers:
        future = CompileMode(compilers).submit("key", FakeKernel, found.append)
        assert found == [future]
        assert future.result().is_loaded


def test_two_launchers_are_never_loaded_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Lock()

    def load(name: str, path: str) -> str:
        assert loading.acquire(blocking=False), "two launchers are loaded at the same moment"
        time.sleep(1e-3)
        loading.release()
        return name + path

    monkeypatch.setattr(triton.runtime.build, "_load_module_from_path", load)
    with launches_compile_only(), ThreadPoolExecutor(8) as threads:
        load_one = triton.runtime.build._load_module_from_path
        loaded = list(threads.map(load_one, "aaaaaaaa", "12345678"))
    assert loaded == [f"a{i}" for i in range(1, 9)]


def test_launchers_are_guarded_until_the_last_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    load, guarded = triton.runtime.build._load_module_from_path, []

    class SlowKernel:
        @property
        def run(self) -> None:
            time.sleep(0.05)  # every call has ended by now
            guarded.append(triton.runtime.build._load_module_from_path is not load)

    def call() -> None:
        triton.runtime._async_compile.active_mode.get().submit("key", SlowKernel, lambda _: None)

    compile_together([call], torch.device("cuda"))
    assert guarded == [True]
    assert triton.runtime.build._load_module_from_path is load


@pytest.mark.gpu
@needs_gpu
def test_a_kernel_is_compiled_once_and_does_not_run(
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
    assert x[0] == 0
    _add_one[(1,)](x)
    assert compiled == ["_add_one"]
    assert x[0] == 1


@pytest.mark.gpu
@needs_gpu
def test_calls_get_zeros_where_kernels_would_have_written() -> None:
    found: list[int] = []

    def call() -> None:
        torch.full((1 << 20,), 77, device=DEVICE)  # leaves its memory to the next tensor
        x = torch.empty(1 << 20, device=DEVICE, dtype=torch.int64)
        _add_one[(1,)](x)
        found.append(int(x.abs().max()))

    compile_together([call], DEVICE)
    assert found == [0]


@triton.jit
def _add_one(x_ptr):  # type: ignore[no-untyped-def]
    tl.atomic_add(x_ptr, 1)


def test_processes_with_one_cache_compile_one_after_the_other(tmp_path: Path) -> None:
    """All ranks of a model would compile the same kernels into a cold cache."""
    cache = tmp_path / "triton/cache"
    with (
        compiling_alone(cache),
        (cache / "outrider.lock").open() as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (cache / "outrider.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_cache_that_cannot_be_locked_keeps_nobody_from_compiling(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with compiling_alone(tmp_path / "file"):
        pass


def test_a_gpu_is_asked_for_its_properties_once_not_at_every_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def properties(index: int) -> dict[str, int]:
        asked.append(index)
        return {"max_shared_mem": 1000}

    utils = SimpleNamespace(get_device_properties=properties)
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    runtime = SimpleNamespace(runtime=SimpleNamespace(driver=driver))
    monkeypatch.setattr("outrider.kernels._dispatch.triton", runtime)
    nobody = torch.device("cuda", 63)
    try:
        assert [num_stages_of(6, 300, nobody) for _ in range(3)] == [3, 3, 3]
    finally:
        shared_bytes.cache_clear()
    assert asked == [63]


@pytest.mark.parametrize("shape", [(6144, 2048), (128, 512), (1024, 12288)])
def test_products_compiled_ahead_have_all_tiles(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, most = torch.empty(shape, dtype=torch.bfloat16), 4096
    tile_of, tiles = product._tile, list[object]()

    def noted(x: Tensor, weight: Tensor, share: int, num_splits: int) -> dict[str, int]:
        tile = tile_of(x, weight, share, num_splits)
        tiles.append((tile, share))
        return tile

    monkeypatch.setattr(product, "_tile", noted)
    monkeypatch.setattr(product, "_product_kernel", defaultdict(lambda: lambda *_, **__: None))
    for launch in own_products(weight, None):
        launch()
    splits, x = product.parts_of(weight), torch.empty(most, shape[1], dtype=torch.bfloat16)
    for num_rows in range(1, most + 1):
        for num_splits in (1, splits):
            share = shape[1] // num_splits
            assert (tile_of(x[:num_rows], weight, share, num_splits), share) in tiles


@pytest.mark.parametrize("shape", [(64, 2048), (96, 5120)])
def test_products_with_few_outputs_compiled_ahead_have_all_forms(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, most = torch.empty(shape, dtype=torch.bfloat16), 4096
    forms = list[object]()

    def launch(*args: object, **options: object) -> None:
        has_parts = args[4] is not None
        forms.append((has_parts, options))

    monkeypatch.setattr(product, "_product_kernel", defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(few_outputs_product, "_few_outputs_kernel", defaultdict(lambda: launch))
    for ahead in own_products(weight, None):
        ahead()
    known = [*forms]
    forms.clear()
    x = torch.empty(most, shape[1], dtype=torch.bfloat16)
    for num_rows in range(1, most + 1):
        product.product(x[:num_rows], weight)
    assert len(forms) == most
    assert all(form in known for form in forms)

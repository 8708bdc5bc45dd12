"""Kernels must fit into the shared memory of smaller GPUs than those they are tuned on."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.narrow_linear import narrow_linear
from outrider.kernels.model.narrow_matrix import Kind, NarrowMatrix, narrow_matrix
from outrider.kernels.model.paged_attention import paged_attention
from outrider.kernels.model.product import product
from outrider.kernels.model.scaled_linear import scaled_linear

triton = pytest.importorskip("triton")

# An RTX 4090: what a program may take, and how many multiprocessors there are.
SHARED_BYTES, NUM_SMS, CAPABILITY = 101_376, 128, 89
HEAD_DIM, PAGE = 128, 16


class Driver:
    """Of a GPU that is not there: kernels can be compiled for it, not launched."""

    def get_current_device(self) -> int:
        return 1000  # kernels of this device are cached apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", CAPABILITY, 32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Each new variant of a kernel that is launched, and what to compile it from."""
    for name, module in list(sys.modules.items()):
        if name.startswith("outrider.kernels."):
            for function, fake in (
                ("uses_triton", lambda tensor: True),
                ("num_programs", lambda device, per_sm: NUM_SMS * per_sm),
                ("shared_bytes", lambda device: SHARED_BYTES),
            ):
                if hasattr(module, function):
                    monkeypatch.setattr(module, function, fake)
    found: list[tuple[Any, str]] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.append((fn.jit_function, compile["specialization_data"]))
        return True  # neither compile nor launch

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    return found


def rows(count: int, width: int) -> Tensor:
    return torch.empty(count, width, dtype=torch.bfloat16)


def plain(num_rows: int) -> None:
    product(rows(num_rows, 4096), rows(6144, 4096))


def narrow(kind: Kind, num_rows: int) -> None:
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kind, torch.uint8)
    scale = torch.ones(32, 1024)
    matrix = narrow_matrix(kind, torch.zeros(1024, 4096, dtype=dtype), scale, group=128)
    narrow_linear(rows(num_rows, 4096), matrix, same_bits=True)


def scaled(num_out: int, num_rows: int) -> None:
    codes = torch.empty(num_out, 4096, dtype=torch.float8_e4m3fn)
    matrix = NarrowMatrix(
        "fp8", codes, torch.ones(1, num_out), None, 4096, 4096, rounds_inputs=True
    )
    scaled_linear(rows(num_rows, 4096), matrix)


def attention(num_seqs: int, rows_each: int, same_bits: bool) -> None:
    num_rows, zeros = num_seqs * rows_each, torch.zeros(num_seqs, dtype=torch.int64)
    begins = torch.zeros(num_seqs + 1, dtype=torch.int32)
    items = list_items(begins, zeros, zeros, num_rows, 8, 4, 4096, same_bits=same_bits)
    cache = torch.empty(1, PAGE, 8, HEAD_DIM, dtype=torch.bfloat16)
    pages = torch.zeros(num_seqs, 4096 // PAGE, dtype=torch.int32)
    paged_attention(
        rows(num_rows, 32 * HEAD_DIM).unflatten(1, (32, -1)), cache, cache, items, pages, 1.0
    )


@pytest.mark.deep
@pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("launch", "cases"),
    [
        (plain, [(16,), (32,), (64,), (200,), (300,)]),
        (narrow, [(kind, n) for kind in ("fp8", "int4") for n in (1, 32, 64, 200)]),
        (scaled, [(6144, 16), (6144, 64), (6144, 128), (24576, 128), (6144, 200), (6144, 300)]),
        (attention, [(1, 1, False), (1, 4, False), (8, 4, False), (2, 300, False)]),
        (attention, [(1, 4, True), (2, 300, True)]),
    ],
)
def test_kernels_fit_into_99_kilobytes(
    launch: Callable[..., None],
    cases: list[tuple[Any, ...]],
    launches: list[tuple[Any, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for case in cases:
        launch(*case)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    assert len(launches) >= len(cases)
    for kernel, variant in launches:
        assert kernel.preload(variant).metadata.shared <= SHARED_BYTES, variant

"""The product of many rows in FP8 on Hopper GPUs, where blocks of weights share a scale.

On a CPU its kernel runs in plain torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model import block_scaled_product as module
from outrider.kernels.model import block_scaled_trial as trial
from outrider.kernels.model.narrow_matrix import NarrowMatrix, dequantise, narrow_matrix
from outrider.kernels.model.row_codes import RowCodes
from outrider.kernels.model.scaled_product import most_rows_in_parts, scaled_product
from outrider.kernels.model.warpgroups import has_warpgroups
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="it does not run in Triton's interpreter"),
    pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon"),
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not has_warpgroups(DEVICE), reason="needs a Hopper GPU"
    ),
]
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a Hopper GPU")


def make_rows(num_rows: int, num_in: int, dtype: torch.dtype) -> RowCodes:
    randn = normals(num_rows)
    codes = (randn(num_rows, num_in) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return RowCodes(codes, randn(num_rows, num_in // 128).abs() / 100, dtype)


def make_matrix(num_out: int, num_in: int) -> NarrowMatrix:
    randn = normals(num_out)
    codes = (randn(num_out, num_in) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = randn(num_in // 128, -(-num_out // 128)).abs() / 10_000
    return narrow_matrix("fp8", codes, scale, group=128, rows=128, rounds_inputs=True)


def exact(x: RowCodes, matrix: NarrowMatrix) -> Tensor:
    rows = x.codes.double() * x.scale.repeat_interleave(128, 1)
    return rows @ dequantise(matrix, torch.float64).t()


# Outputs, inputs; outputs that are no whole tiles, and tiles that programs have several of.
CASES = [
    pytest.param(130, 40, 256, 1, False, False, False, id="tails"),
    pytest.param(200, 256, 1024, 1, False, True, False, id="adds"),
    pytest.param(70, 192, 512, 1, False, True, True, id="adds with a bias"),
    pytest.param(300, 128, 768, 1, True, False, False, id="gated"),
    pytest.param(70, 192, 256, 1, True, False, True, id="gated with a bias"),
    pytest.param(140, 136, 1024, 2, False, True, False, id="two shares"),
    pytest.param(200, 128, 1024, 4, False, True, True, id="four shares with a bias"),
]


@interpreted
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "num_splits", "gated", "adds", "has_bias"), CASES
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_product_of_the_numbers_that_codes_stand_for(
    num_rows: int,
    num_out: int,
    num_in: int,
    num_splits: int,
    gated: bool,
    adds: bool,
    has_bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_block_scaled_kernel", Kernel(2, num_rows, "_block_scaled_kernel"))
    x, randn = make_rows(num_rows, num_in, dtype), normals(1)
    matrix = make_matrix(2 * num_out if gated else num_out, num_in)
    out = randn(num_rows, num_out).to(dtype)
    bias = randn(len(matrix.codes)).to(dtype) if has_bias else None
    expected = exact(x, matrix)
    if bias is not None:
        expected += bias
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    if adds:
        expected += out
    module.block_scaled_product(out, x, matrix, bias, num_splits=num_splits, gated=gated, adds=adds)
    assert (out - expected).norm() < 5e-3 * expected.norm()


@interpreted
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_warps_and_copies_gives_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, matrix = make_rows(150, 1024, torch.float16), make_matrix(300, 1024)
    outs = []
    for each in (100, seed):
        monkeypatch.setattr(module, "_block_scaled_kernel", Kernel(1, each, "_block_scaled_kernel"))
        outs.append(out := torch.zeros(150, 300, dtype=torch.float16))
        module.block_scaled_product(out, x, matrix, None, num_splits=2, gated=False, adds=True)
    assert torch.equal(*outs)


@pytest.mark.parametrize("where", ["codes", "scale"])
def test_nan_stays_in_its_row(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As padding may have it."""
    if DEVICE.type == "cpu":
        kernel = Kernel(2, name="_block_scaled_kernel")
        monkeypatch.setattr(module, "_block_scaled_kernel", kernel)
    x, matrix = make_rows(70, 512, torch.bfloat16), make_matrix(192, 512)
    if where == "codes":
        x.codes.view(torch.uint8)[5, 300] = 0x7F
    else:
        x.scale[5, 2] = torch.nan
    out = torch.empty(70, 192, dtype=x.dtype, device=DEVICE)
    module.block_scaled_product(out, x, matrix, None, num_splits=1, gated=False, adds=False)
    is_nan = torch.arange(70, device=DEVICE)[:, None].expand(70, 192) == 5
    assert torch.equal(out.isnan(), is_nan)


@on_gpu
@pytest.mark.parametrize(
    ("num_out", "num_in", "num_splits", "gated", "adds", "has_bias"),
    [
        (40, 256, 1, False, False, False),
        (1000, 1536, 1, False, False, True),
        (5120, 6144, 1, False, True, False),
        (2048, 4096, 4, False, True, False),
        (4096, 2048, 2, False, True, True),
        (4160, 5120, 1, True, False, False),
        (512, 2048, 1, True, False, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_have_the_same_bits_among_many_as_among_few(
    num_out: int,
    num_in: int,
    num_splits: int,
    gated: bool,
    adds: bool,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    matrix = make_matrix(2 * num_out if gated else num_out, num_in)
    assert module.is_for(matrix, num_splits=num_splits, gated=gated)
    bias = normals()(len(matrix.codes)).to(dtype) if has_bias else None
    x, residual = make_rows(2100, num_in, dtype), normals()(2100, num_out).to(dtype)

    def multiplied(first: int, end: int) -> Tensor:
        rows = RowCodes(x.codes[first:end], x.scale[first:end], dtype)
        out = residual[first:end].clone()
        scaled_product(out, rows, matrix, bias, num_splits=num_splits, gated=gated, adds=adds)
        return out

    many = multiplied(0, 2100)
    for first, end in [(0, 16), (0, 64), (0, 65), (0, 256), (100, 101), (127, 187), (1844, 2100)]:
        assert torch.equal(multiplied(first, end), many[first:end])


@on_gpu
def test_it_works_here() -> None:
    assert trial._error(DEVICE, torch.bfloat16) == 0.0


@interpreted
def test_more_rows_than_its_programs_take_are_not_added_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = make_matrix(128, 512)
    assert most_rows_in_parts(matrix) == 256
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    assert most_rows_in_parts(matrix) == 128
    assert most_rows_in_parts(make_matrix(128, 384)) == 256  # which it is not for


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """Tries the kernel as on a Hopper GPU; whether it multiplies by a matrix then."""

    def multiply(out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Any, **how: Any) -> None:
        options = {"num_splits": 1, "gated": False, "adds": False} | how
        module.block_scaled_product(out, x, matrix, bias, **options)

    failed: set[torch.device] = set()
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(trial, "scaled_product", multiply)
    for place in (module, trial):
        monkeypatch.setattr(place, "failed", failed)

    def is_for(num_in: int = 256) -> bool:
        matrix = make_matrix(128, num_in)
        trial.try_block_scaled_product(matrix, torch.bfloat16)
        return module.is_for(matrix)

    trial._try.cache_clear()
    yield is_for
    trial._try.cache_clear()


@interpreted
def test_a_kernel_that_works_is_used(
    tried: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(2, name="_block_scaled_kernel")
    monkeypatch.setattr(module, "_block_scaled_kernel", kernel)
    assert not tried(384)  # which it is not for: not tried
    assert kernel.num_launches == 0
    assert tried()
    assert tried()
    assert kernel.num_launches == 4  # once for all matrices: gated or added, many rows or few
    assert not caplog.records


class Wrong(Kernel):
    """Computes many rows a little differently."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(out: Tensor, *args: Any, **options: Any) -> None:
            super(Wrong, self).__getitem__(grid)(out, *args, **options)
            if len(out) > 256:
                out[-1, -1] += 0.5

        return launch


class Broken:
    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        raise RuntimeError("Cannot find ptxas\nlook there")


@interpreted
@pytest.mark.parametrize(
    ("make_kernel", "reason"),
    [
        (Broken, "RuntimeError: Cannot find ptxas)"),
        (lambda: Wrong(2, name="_block_scaled_kernel"), "wrong by"),
    ],
)
def test_what_fails_on_a_gpu_goes_on_by_the_other_kernel_with_one_warning(
    make_kernel: Callable[[], Any],
    reason: str,
    tried: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_block_scaled_kernel", make_kernel())
    assert not tried()
    assert not tried()
    assert [reason in record.getMessage() for record in caplog.records] == [True]

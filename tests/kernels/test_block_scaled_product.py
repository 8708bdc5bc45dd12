"""The product of many rows in FP8 on Hopper GPUs, where blocks of weights share a scale.

On a CPU its kernel runs in plain torch.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import block_scaled
import pytest
import torch
from block_scaled import exact, interpreted, make_matrix, make_rows, on_gpu
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model import block_scaled_experts, block_scaled_few_rows
from outrider.kernels.model import block_scaled_product as module
from outrider.kernels.model import scaled_trial as trial
from outrider.kernels.model.narrow_matrix import NarrowMatrix
from outrider.kernels.model.row_codes import RowCodes
from outrider.kernels.model.scaled_product import most_rows_in_parts, scaled_product
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS


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
    expected = exact(x, matrix, bias, gated=gated)
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
    assert trial.error_of_blocks(DEVICE, torch.bfloat16) == 0.0


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
    """Tries the kernels as on a Hopper GPU; whether they multiply by a matrix then."""

    def multiply(
        out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Any = None, *, num_splits: int = 1,
        gated: bool = False, adds: bool = False,
    ) -> None:  # fmt: skip
        how: dict[str, Any] = {"num_splits": num_splits, "gated": gated}
        if adds or len(x.codes) > block_scaled_few_rows.FEW_ROWS:
            module.block_scaled_product(out, x, matrix, bias, adds=adds, **how)
        else:
            block_scaled_few_rows.block_scaled_few_rows(out, x, matrix, bias, **how)

    failed: set[torch.device] = set()
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(trial, "scaled_product", multiply)
    monkeypatch.setattr(module, "failed", failed)

    def is_for(num_in: int = 256, dtype: torch.dtype = torch.bfloat16) -> bool:
        matrix = make_matrix(128, num_in)
        trial.try_scaled_product(matrix, dtype)
        return module.is_for(matrix)

    trial.try_blocks.cache_clear()
    yield is_for
    trial.try_blocks.cache_clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of those of many and of few rows, and of experts."""
    many, few = Kernel(2, name="_block_scaled_kernel"), Kernel(name="_block_scaled_few_rows_kernel")
    of_experts = Kernel(2, name="_experts_kernel")
    monkeypatch.setattr(block_scaled_experts, "_experts_kernel", of_experts)
    monkeypatch.setattr(module, "_block_scaled_kernel", many)
    monkeypatch.setattr(block_scaled_few_rows, "_block_scaled_few_rows_kernel", few)
    return [many, few, of_experts]


@interpreted
def test_kernels_that_work_are_used(
    tried: Callable[..., bool], kernels: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert not tried(384)  # which they are not for: not tried
    assert [kernel.num_launches for kernel in kernels] == [0, 0, 0]
    assert tried()
    assert tried()
    # Once for all matrices: gated, or added as a whole, which few rows are by a third kernel that
    # that of many rows stands for; few rows gated or in parts. Experts' layers beside dense ones.
    assert [kernel.num_launches for kernel in kernels] == [3, 4, 2]
    assert tried(dtype=torch.float32)  # for which that of experts is not
    assert [kernel.num_launches for kernel in kernels] == [6, 6, 2]
    assert not caplog.records


def wrong(kernel: Any, by: float = 0.5) -> Any:
    """Computes a number a little differently."""

    class Wrong:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(out: Tensor, *args: Any, **options: Any) -> None:
                kernel[grid](out, *args, **options)
                if out.dtype != torch.float8_e4m3fn:  # experts' inner numbers
                    out[..., -1, -1] += by

            return launch

    return Wrong()


class Broken:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        raise RuntimeError("Cannot find ptxas\nlook there")


@interpreted
@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda _: Broken(), "RuntimeError: Cannot find ptxas)"),
        (wrong, "wrong by"),
        (partial(wrong, by=torch.nan), "wrong by nan"),
    ],
)
@pytest.mark.parametrize("rows", ["many", "few", "of experts"])
def test_what_fails_on_a_gpu_goes_on_by_the_other_kernel_with_one_warning(
    rows: str,
    fail: Callable[[Any], Any],
    reason: str,
    tried: Callable[..., bool],
    kernels: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    many, few, of_experts = kernels
    if rows == "many":
        monkeypatch.setattr(module, "_block_scaled_kernel", fail(many))
    elif rows == "of experts":
        monkeypatch.setattr(block_scaled_experts, "_experts_kernel", fail(of_experts))
    else:
        monkeypatch.setattr(block_scaled_few_rows, "_block_scaled_few_rows_kernel", fail(few))
    assert not tried()
    assert not tried()
    assert [reason in record.getMessage() for record in caplog.records] == [True]

"""What holds of both products of many rows in FP8 on Hopper GPUs: where blocks of weights share a
scale, and where rows and outputs have one each.

On a CPU their kernels run in plain torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import block_scaled
import pytest
import torch
from block_scaled import (
    exact,
    interpreted,
    make_matrix,
    make_rows,
    matrix_with_scales_of_outputs,
    on_gpu,
    rows_with_one_scale,
)
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model import block_scaled_product, row_scaled_product
from outrider.kernels.model import scaled_trial as trial
from outrider.kernels.model.narrow_matrix import NarrowMatrix
from outrider.kernels.model.row_codes import RowCodes
from outrider.kernels.model.scaled_product import scaled_product
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS


@dataclass(frozen=True)
class Kind:
    """A kernel, and what it multiplies."""

    module: Any
    kernel: str
    make_rows: Callable[[int, int, torch.dtype], RowCodes]
    make_matrix: Callable[[int, int], NarrowMatrix]

    def with_kernel(
        self, monkeypatch: pytest.MonkeyPatch, num_programs: int, seed: int = 0
    ) -> None:
        """In plain torch, by so many programs."""
        if DEVICE.type == "cpu":
            kernel = Kernel(num_programs, seed, self.kernel)
            monkeypatch.setattr(self.module, self.kernel, kernel)

    def multiply(
        self, out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Tensor | None = None, *,
        num_splits: int = 1, gated: bool = False, adds: bool = False,
    ) -> None:  # fmt: skip
        how: dict[str, Any] = {"num_splits": num_splits, "gated": gated, "adds": adds}
        if self is BLOCKS:
            block_scaled_product.block_scaled_product(out, x, matrix, bias, **how)
        else:
            last = 512 if matrix.num_in // num_splits > 512 else 0
            row_scaled_product.row_scaled_product(out, x, matrix, bias, last=last, **how)


BLOCKS = Kind(block_scaled_product, "_block_scaled_kernel", make_rows, make_matrix)
ROWS = Kind(
    row_scaled_product, "_row_scaled_kernel", rows_with_one_scale, matrix_with_scales_of_outputs
)
KINDS = pytest.mark.parametrize("kind", [BLOCKS, ROWS], ids=["blocks", "rows"])

# Outputs, inputs; outputs that are no whole tiles, and tiles that programs have several of.
CASES = [
    pytest.param(BLOCKS, 130, 40, 256, 1, False, False, False, id="blocks, tails"),
    pytest.param(BLOCKS, 200, 256, 1024, 1, False, True, False, id="blocks, adds"),
    pytest.param(BLOCKS, 70, 192, 512, 1, False, True, True, id="blocks, adds with a bias"),
    pytest.param(BLOCKS, 300, 128, 768, 1, True, False, False, id="blocks, gated"),
    pytest.param(BLOCKS, 70, 192, 256, 1, True, False, True, id="blocks, gated with a bias"),
    pytest.param(BLOCKS, 140, 136, 1024, 2, False, True, False, id="blocks, two shares"),
    pytest.param(BLOCKS, 200, 128, 1024, 4, False, True, True, id="blocks, four with a bias"),
    pytest.param(ROWS, 130, 40, 256, 1, False, False, False, id="rows, tails"),
    pytest.param(ROWS, 200, 500, 1024, 1, False, True, False, id="rows, wide tiles, adds"),
    pytest.param(ROWS, 70, 192, 512, 1, False, True, True, id="rows, adds with a bias"),
    pytest.param(ROWS, 300, 264, 768, 1, True, False, False, id="rows, gated"),
    pytest.param(ROWS, 70, 192, 128, 1, True, False, True, id="rows, gated with a bias"),
    pytest.param(ROWS, 140, 136, 1280, 2, False, True, False, id="rows, two shares"),
    pytest.param(ROWS, 200, 128, 1024, 4, False, True, True, id="rows, four with a bias"),
]


@interpreted
@pytest.mark.parametrize(
    ("kind", "num_rows", "num_out", "num_in", "num_splits", "gated", "adds", "has_bias"), CASES
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_are_the_products_of_the_numbers_that_codes_stand_for(
    kind: Kind, num_rows: int, num_out: int, num_in: int, num_splits: int, gated: bool, adds: bool,
    has_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kind.with_kernel(monkeypatch, 2, num_rows)
    x, randn = kind.make_rows(num_rows, num_in, dtype), normals(1)
    matrix = kind.make_matrix(2 * num_out if gated else num_out, num_in)
    out = randn(num_rows, num_out).to(dtype)
    bias = randn(len(matrix.codes)).to(dtype) if has_bias else None
    expected = exact(x, matrix, bias, gated=gated)
    if adds:
        expected += out
    kind.multiply(out, x, matrix, bias, num_splits=num_splits, gated=gated, adds=adds)
    assert (out - expected).norm() < 5e-3 * expected.norm()


@interpreted
@KINDS
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_warps_and_copies_gives_the_same(
    kind: Kind, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, matrix = kind.make_rows(150, 1024, torch.float16), kind.make_matrix(300, 1024)
    outs = []
    for each in (100, seed):
        kind.with_kernel(monkeypatch, 1, each)
        outs.append(out := torch.zeros(150, 300, dtype=torch.float16))
        kind.multiply(out, x, matrix, num_splits=2, adds=True)
    assert torch.equal(*outs)


@KINDS
@pytest.mark.parametrize("where", ["codes", "scale"])
def test_nan_stays_in_its_row(kind: Kind, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As padding may have it."""
    kind.with_kernel(monkeypatch, 2)
    x, matrix = kind.make_rows(70, 512, torch.bfloat16), kind.make_matrix(192, 512)
    if where == "codes":
        x.codes.view(torch.uint8)[5, 300] = 0x7F
    else:
        x.scale[5, -1] = torch.nan
    out = torch.empty(70, 192, dtype=x.dtype, device=DEVICE)
    kind.multiply(out, x, matrix)
    is_nan = torch.arange(70, device=DEVICE)[:, None].expand(70, 192) == 5
    assert torch.equal(out.isnan(), is_nan)


SHAPES = [
    (40, 256, 1, False, False, False),
    (1000, 1536, 1, False, False, True),
    (5120, 6144, 1, False, True, False),
    (2048, 4096, 4, False, True, False),
    (4096, 2048, 2, False, True, True),
    (4160, 5120, 1, True, False, False),
    (512, 2048, 1, True, False, True),
]


@on_gpu
@pytest.mark.parametrize(
    ("kind", "num_out", "num_in", "num_splits", "gated", "adds", "has_bias"),
    [
        *((kind, *shape) for kind in (BLOCKS, ROWS) for shape in SHAPES),
        (ROWS, 520, 2048, 1, True, False, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_have_the_same_bits_among_many_as_among_few(
    kind: Kind, num_out: int, num_in: int, num_splits: int, gated: bool, adds: bool,
    has_bias: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    matrix = kind.make_matrix(2 * num_out if gated else num_out, num_in)
    assert kind.module.is_for(matrix, num_splits=num_splits)
    bias = normals()(len(matrix.codes)).to(dtype) if has_bias else None
    x, residual = kind.make_rows(2100, num_in, dtype), normals()(2100, num_out).to(dtype)

    def multiplied(first: int, end: int) -> Tensor:
        rows = RowCodes(x.codes[first:end], x.scale[first:end], dtype)
        out = residual[first:end].clone()
        scaled_product(out, rows, matrix, bias, num_splits=num_splits, gated=gated, adds=adds)
        return out

    many = multiplied(0, 2100)
    places = [(0, 16), (0, 64), (0, 65), (0, 256), (0, 257), (100, 101), (127, 187), (1844, 2100)]
    for first, end in places:
        assert torch.equal(multiplied(first, end), many[first:end])


@on_gpu
@pytest.mark.parametrize("error", [trial.error_of_blocks, trial.error_of_rows])
def test_they_work_here(error: Callable[[torch.device, torch.dtype], float]) -> None:
    assert error(DEVICE, torch.bfloat16) == 0.0

"""What tests of products in Gluon on Hopper GPUs share: marks for all, and rows and matrices in FP8
where blocks of 128 x 128 weights share a scale, or outputs have one each. On a CPU the kernels run
in plain torch.
"""

from collections.abc import Callable

import pytest
import torch
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model.narrow_matrix import NarrowMatrix, dequantise, narrow_matrix
from outrider.kernels.model.row_codes import RowCodes
from outrider.kernels.model.warpgroups import has_warpgroups
from outrider.kernels.triton_or_none import HAS_GLUON

MARKS = [
    pytest.mark.skipif(INTERPRET, reason="it does not run in Triton's interpreter"),
    pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon"),
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not has_warpgroups(DEVICE), reason="needs a Hopper GPU"
    ),
]
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a Hopper GPU")


class Broken:
    """In place of a kernel that does not compile."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        raise RuntimeError("Cannot find ptxas\nlook there")


def make_rows(num_rows: int, num_in: int, dtype: torch.dtype, group: int = 128) -> RowCodes:
    randn = normals(num_rows)
    codes = (randn(num_rows, num_in) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return RowCodes(codes, randn(num_rows, num_in // group).abs() / 100, dtype)


def rows_with_one_scale(num_rows: int, num_in: int, dtype: torch.dtype) -> RowCodes:
    return make_rows(num_rows, num_in, dtype, num_in)


def make_matrix(num_out: int, num_in: int, group: int = 128, rows: int = 128) -> NarrowMatrix:
    randn = normals(num_out)
    codes = (randn(num_out, num_in) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = randn(num_in // group, -(-num_out // rows)).abs() / 10_000
    return narrow_matrix("fp8", codes, scale, group=group, rows=rows, rounds_inputs=True)


def matrix_with_scales_of_outputs(num_out: int, num_in: int) -> NarrowMatrix:
    return make_matrix(num_out, num_in, num_in, 1)


def exact(
    x: RowCodes, matrix: NarrowMatrix, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    """What a product should be, in float64; a scale of x is of 128 inputs, or of all."""
    group = x.codes.shape[1] // x.scale.shape[1]
    y = (
        x.codes.double()
        * x.scale.repeat_interleave(group, 1)
        @ dequantise(matrix, torch.float64).t()
    )
    if bias is not None:
        y += bias
    if gated:
        gate, up = y.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up
    return y

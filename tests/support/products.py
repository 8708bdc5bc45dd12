"""What products with matrices are tested on, whatever their matrices are kept in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model.narrow_matrix import Kind, NarrowMatrix, has_4_bits, narrow_matrix
from outrider.kernels.model.rms_norm import Norm


class Fused(NamedTuple):
    """What is done together with a product."""

    norm: bool = False  # of the inputs or, if the product is added to a residual, of the sum
    gated: bool = False
    residual: bool = False
    bias: bool = False

    def num_outputs(self, num_out: int) -> int:
        """Outputs of the matrix for `num_out` of the product: a gate takes as many again."""
        return 2 * num_out if self.gated else num_out


FUSED = (
    Fused(),
    Fused(norm=True, gated=True),
    Fused(norm=True, bias=True),
    Fused(gated=True, bias=True),
    Fused(residual=True),
    Fused(norm=True, residual=True),
    Fused(norm=True, residual=True, bias=True),
)
NUM_ROWS = (1, 2, 17, 70, 300)
SIZES = ((256, 80), (544, 48), (1024, 40))  # inputs, outputs
ALL = 1 << 20  # inputs or outputs that share a scale: more than any matrix here has

# Kind, group, outputs of a scale, whether there are zero points.
NumberFormat = tuple[Kind, int, int, bool]


class Inputs(NamedTuple):
    """The inputs of a product with a matrix of K inputs, for T rows of N outputs."""

    x: Tensor  # [T, K], rows that do not follow each other in memory
    bias: Tensor | None
    norm: Norm | None
    residual: Tensor  # [T, N]


def inputs_of(fused: Fused, num_rows: int, num_in: int, num_out: int) -> Inputs:
    randn = normals(num_rows)
    return Inputs(
        x=randn(num_rows, num_in + 3)[:, :num_in],
        bias=randn(fused.num_outputs(num_out)) if fused.bias else None,
        norm=Norm(randn(num_out if fused.residual else num_in), 1e-5) if fused.norm else None,
        residual=randn(num_rows, num_out),
    )


def narrow_of(format_: NumberFormat, num_out: int, num_in: int) -> NarrowMatrix:
    """A random matrix."""
    kind, group, rows, has_zero = format_
    generator = torch.Generator().manual_seed(num_out)

    def codes_below(end: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=generator, dtype=torch.uint8)

    group, rows = min(group, num_in), min(rows, num_out)
    shape = (-(-num_in // group), -(-num_out // rows))
    codes = codes_below(16 if has_4_bits(kind) else 256, num_out, num_in)
    if kind == "fp8":
        codes[codes % 128 == 127] = 126  # not a number
        codes = codes.view(torch.float8_e4m3fn)
    elif kind == "int8":
        codes = codes.view(torch.int8)
    zero = None
    if has_zero:
        zero = codes_below(16, shape[0], num_out).to(torch.int8).to(DEVICE)
    scale = torch.rand(*shape, generator=generator) / 100 + 0.001
    factor = None
    if kind == "nvfp4":  # with scales of every size, but for what is not a number
        scale = codes_below(127, *shape).view(torch.float8_e4m3fn)
        factor = (torch.rand(num_out, generator=generator) / 1e4).to(DEVICE)
    return narrow_matrix(
        kind, codes.to(DEVICE), scale.to(DEVICE), group=group, rows=rows, zero=zero, factor=factor
    )


def check_rows_keep_bits(
    multiply: Callable[..., Tensor],
    add_to: Callable[..., object],
    matrix: Any,
    num_rows: int,
    parts: list[tuple[int, int]],
) -> None:
    """Assert that some of `num_rows` rows come out, to the bit, as they do among all.

    `multiply(x, matrix, bias, gated=False)` and `add_to(residual, x, matrix)` are for a matrix of
    96 outputs and 1024 inputs.
    """
    randn = normals(dtype=torch.bfloat16)
    x, bias, residual = randn(num_rows, 1024), randn(96), randn(num_rows, 96)
    outs, gates, sums = multiply(x, matrix, bias), multiply(x, matrix, gated=True), residual.clone()
    add_to(sums, x, matrix)
    for first, last in parts:
        some = slice(first, last)
        assert torch.equal(multiply(x[some], matrix, bias), outs[some])
        assert torch.equal(multiply(x[some], matrix, gated=True), gates[some])
        added = residual[some].clone()
        add_to(added, x[some], matrix)
        assert torch.equal(added, sums[some])

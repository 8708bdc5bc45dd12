"""What products with matrices are tested on, whatever their matrices are kept in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from random_tensors import normals
from torch import Tensor

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

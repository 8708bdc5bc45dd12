"""A mixture of experts, MLPs whose matrices are plain or have 4 or 8 bits a number:

    y += sum over a row's experts of weight * down(activation(first(x)))

The first layer of gated ones is gate and up, of others up alone.

A program multiplies a tile of rows that share an expert by some outputs of it. Codes become numbers
of x's dtype, which holds them exactly, on their way to the tensor cores; those in blocks of FP8
multiply codes of rows, in a kernel of their own if there are many rows on a Hopper GPU. Sums are
float32. An output adds up its inputs in one order, whatever the tile, so the bits of a row do not
depend on the batch.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from . import block_scaled_experts
from .block_scaled_experts import TiledRows, tiled_activations, tiled_parts
from .expert_matrix import (
    RELU_SQUARED,
    SILU,
    Activation,
    ExpertMatrix,
    Glu,
    expert_of,
    layers_in_first,
    row_format_of,
)
from .experts_product import experts_product
from .narrow_matrix import RowFormat
from .rms_norm import Norm
from .routing import Routing
from .row_codes import RowCodes, Rows, as_wanted, rounded_rows
from .silu_mul import silu_mul_reference
from .split_product import add_parts

# Parts of sums that are written before they are added. More would leave a GPU's cache.
_MOST_PARTS_BYTES = 1 << 25
_OUTPUTS_AT_ONCE = 1024  # of a batch with more parts
# What experts' last layer takes, of each pair of a row and one of its experts.
PairRows = Rows | TiledRows
# (expert, its rows) -> their products with its matrix, plus its bias. [n, K] -> [n, N]
ExpertProduct = Callable[[int, Tensor], Tensor]


def expert_activations(
    x: Rows,
    routing: Routing,
    first: ExpertMatrix,
    activation: Activation,
    wanted: RowFormat | None = None,
) -> PairRows:
    """Those of each pair of a row and one of its experts, for `add_experts`.

    `wanted`: what the experts' last layer rounds them to, if it does; they may be rounded already.
    Shape: x [T, K], rows dense, first [2 N, K] each, the gate's outputs first, or [N, K] without a
        gate -> [T * k, N]
    """
    if isinstance(x, Tensor) and not uses_triton(x):
        num_out = first.num_out // layers_in_first(activation)
        return activations_by_expert(
            x, routing, partial(product_reference, first), num_out, activation
        )
    x = as_wanted(x, row_format_of(first))
    if block_scaled_experts.is_for(x, routing, first, activation, wanted):
        assert isinstance(x, RowCodes)
        assert isinstance(activation, Glu)
        return tiled_activations(x, routing, first, activation)
    return experts_product(x, routing, first, activation)


def add_experts(
    residual: Tensor,
    inner: PairRows,
    routing: Routing,
    down: ExpertMatrix,
    norm: Norm | None = None,
) -> Rows | None:
    """Add the weighted outputs of each row's pairs to the residual in place. Returns norm(residual)
    if that comes cheaply.

    Otherwise returns None, and the layer that reads the residual must apply `norm`. A prompt has
    too many parts to write them all: some outputs are added after others, which changes no sum.
    Shape: residual [T, N] dense, inner [T * k, K], down [N, K] each -> [T, N]
    """
    if isinstance(inner, Tensor) and not uses_triton(inner):
        add_by_expert(residual, inner, routing, partial(product_reference, down))
        return None
    if isinstance(inner, TiledRows):
        product = partial(tiled_parts, inner, routing, down)
    else:
        rows = as_wanted(inner, row_format_of(down))
        product = partial(experts_product, rows, routing, down, None)
    width = residual.shape[1]
    if routing.ids.numel() * width * residual.element_size() <= _MOST_PARTS_BYTES:
        parts = product()
        return add_parts(residual, parts, norm, num_real=routing.num_rows)
    for first in range(0, width, _OUTPUTS_AT_ONCE):
        some = range(first, min(first + _OUTPUTS_AT_ONCE, width))
        add_parts(
            residual[:, some.start : some.stop],
            product(some),  # not kept: one at a time
            None,
            num_real=routing.num_rows,
        )
    return None


def activations_by_expert(
    x: Tensor, routing: Routing, product: ExpertProduct, num_out: int, activation: Activation
) -> Tensor:
    """`expert_activations`, one expert at a time, and only those that some row has."""
    top_k = routing.ids.shape[1]
    found = x.new_empty(routing.ids.numel(), num_out)
    for expert in _taken(routing):
        row, choice = (routing.ids == expert).nonzero(as_tuple=True)
        y = _activated(product(expert, x[row]).float(), activation)
        found[row * top_k + choice] = y.to(x.dtype)
    return found


def _taken(routing: Routing) -> list[int]:
    return [expert for expert in routing.ids.unique().tolist() if expert >= 0]


def _activated(y: Tensor, activation: Activation) -> Tensor:
    if activation == RELU_SQUARED:
        return F.relu(y).square()
    if activation == SILU:  # row by row, so that torch rounds one alike wherever it lies
        return silu_mul_reference(y)
    glu, (gate, up) = activation, y.chunk(2, 1)
    gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    return (up + glu.shift) * gate * torch.sigmoid(glu.alpha * gate)


def add_by_expert(
    residual: Tensor, inner: Tensor, routing: Routing, product: ExpertProduct
) -> None:
    """`add_experts`, one expert at a time, in their order."""
    total = torch.zeros_like(residual, dtype=torch.float32)
    for expert in _taken(routing):
        row, choice = (routing.ids == expert).nonzero(as_tuple=True)
        y = product(expert, inner[row * routing.ids.shape[1] + choice]).float()
        total.index_add_(0, row, routing.weights[row, choice, None] * y)
    residual.add_(total.to(residual.dtype))


def product_reference(layer: ExpertMatrix, expert: int, rows: Tensor) -> Tensor:
    """Rows by one expert's matrix, plus its bias. Shape: [n, K] -> [n, N]."""
    if (row_format := row_format_of(layer)) is not None:
        rows = rounded_rows(rows, row_format)
    return F.linear(rows, *expert_of(layer, expert, rows.dtype))

"""The norm behind a layer with a state: of each head, or group of heads, by itself, and gated."""

import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .rms_norm import Norm, inverse_rms, rms_norm_reference
from .row_codes import Rows, as_wanted, empty_rows, places_of, store_heads
from .silu_mul import silu

_AT_ONCE = 1024  # numbers of a program, if a head has fewer


def gated_norm(x: Tensor, norm: Norm, gate: Tensor, *, gates_first: bool = False) -> Rows:
    """norm(x) silu(gate) of each head or, with `gates_first`, norm(x silu(gate)).

    Heads have the same weights [dim], or each its own [heads, dim]. Rounded if the norm rounds.
    Shape: x [T, heads, dim], dense; gate [T, heads * dim], each row dense -> [T, heads * dim].
    """
    num_rows, num_heads, dim = x.shape
    if not uses_triton(x):
        return gated_norm_reference(x, norm, gate, gates_first=gates_first)
    assert x.is_contiguous()
    assert norm.weight.is_contiguous()
    assert gate.stride(1) == 1
    # By the width of a head alone: how it is summed depends on it.
    block = triton.next_power_of_2(dim)
    heads = max(1, _AT_ONCE // block)
    rows = empty_rows(x.flatten(1), norm.rounds, size=heads * dim if dim == block else 1)
    _gated_norm_kernel[(num_rows, triton.cdiv(num_heads, heads))](
        x, norm.weight, norm.eps, gate, gate.stride(0), num_heads,
        **places_of(rows, norm.rounds), NUM_IN=num_heads * dim, DIM=dim,
        WEIGHT_STRIDE=dim if norm.weight.ndim == 2 else 0, GATES_FIRST=gates_first, HEADS=heads,
        BLOCK=block, num_warps=max(4, min(8, block // 512)), **dependent_launch(x.device),
    )  # fmt: skip
    return as_wanted(rows, norm.rounds)


def gated_norm_reference(
    x: Tensor, norm: Norm, gate: Tensor, *, gates_first: bool = False
) -> Tensor:
    wide, factor = x.float(), F.silu(gate.float()).view_as(x)
    if gates_first:
        wide = wide * factor
    normed = rms_norm_reference(wide, norm._replace(weight=norm.weight.float()))
    if not gates_first:
        normed = normed * factor
    return normed.flatten(1).to(x.dtype)


@triton.jit
def _gated_norm_kernel(
    x_ptr,  # [T, heads, DIM]
    weight_ptr,  # [DIM], or of each head
    eps,
    gate_ptr,  # [T, heads * DIM]
    gate_stride,
    num_heads,
    out_ptr,  # [T, heads, DIM] or None
    codes_ptr,  # [T, WIDTH] or None
    codes_scale_ptr,  # [T, groups] or None
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_IN: tl.constexpr,
    DIM: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: HEADS heads of one row."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (head < num_heads) & (d < DIM)
    at = (row * num_heads + head) * DIM + d
    weight_at = weight_ptr + head * WEIGHT_STRIDE + d
    weight = tl.load(weight_at, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    y = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + head * DIM + d, mask=mask, other=0.0)
    factor = silu(gate.to(tl.float32))
    if GATES_FIRST:
        y *= factor
    y *= inverse_rms(tl.sum(y * y, 1), eps, DIM)[:, None] * weight
    if not GATES_FIRST:
        y *= factor
    y = y.to(x_ptr.dtype.element_ty)
    store_heads(
        y, row, at, mask, out_ptr, codes_ptr, codes_scale_ptr, NUM_IN, WIDTH, GROUP, HEADS * DIM
    )  # fmt: skip

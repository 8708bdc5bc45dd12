"""Merges the sums that attention makes of the splits of a row's tokens, in a kernel of its own.

The last program of a row to finish could do it, as in `paged_attention`. But it would load 16
splits of many rows alone, where all multiprocessors can share them.
"""

import torch
from torch import Tensor

from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .softmax_sums import LOG2_E, add

_AHEAD = 8  # splits on their way at once


def merge_parts(
    parts: Tensor, states: Tensor, seen: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Add up the parts of each row, in the order of the splits.

    Shape:
        parts: [T, num_heads, num_splits, dim] float32, sums of values
        states: [T, num_heads, num_splits, 2] float32, their maximum and total
        seen: [T, num_heads, 2] int32, the first and last split of a row
        sinks: [num_heads] or None
        returns: [T, num_heads, dim] of that dtype
    """
    num_rows, num_heads, num_splits, dim = parts.shape
    out = torch.empty(num_rows, num_heads, dim, dtype=dtype, device=parts.device)
    _merge_parts_kernel[(num_rows * num_heads,)](
        out,
        parts,
        states,
        seen,
        sinks,
        num_splits,
        NUM_HEADS=num_heads,
        DIM=dim,
        AHEAD=_AHEAD,
        num_warps=4,
        **dependent_launch(parts.device),
    )
    return out


@triton.jit(do_not_specialize=["num_splits"])
def _merge_parts_kernel(
    out_ptr,  # [T, NUM_HEADS, DIM]
    parts_ptr,  # [T, NUM_HEADS, num_splits, DIM]
    states_ptr,  # [T, NUM_HEADS, num_splits, 2]
    seen_ptr,  # [T, NUM_HEADS, 2]
    sinks_ptr,  # [NUM_HEADS] or None
    num_splits,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: one head of one row."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM)[None, :]
    best, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    no_value = tl.zeros([1, DIM], tl.float32)
    acc = no_value
    wait_for_inputs(DEPENDENT)
    # Of rows that no sequence has, these may be any numbers.
    first_split = tl.maximum(tl.load(seen_ptr + row * 2), 0)
    last_split = tl.minimum(tl.load(seen_ptr + row * 2 + 1), num_splits - 1)
    for first in range(first_split, last_split + 1, AHEAD):
        loaded = ()
        for i in tl.static_range(AHEAD):
            part, is_part = row * num_splits + first + i, first + i <= last_split
            part_best = tl.load(states_ptr + part * 2, mask=is_part, other=float("-inf"))
            part_total = tl.load(states_ptr + part * 2 + 1, mask=is_part, other=0.0)
            part_acc = tl.load(parts_ptr + part * DIM + dims, mask=is_part, other=0.0)
            loaded += ((part_best, part_total, part_acc),)  # type: ignore[assignment]
        tl.debug_barrier()  # else the assembler would put sums between the loads
        for i in tl.static_range(AHEAD):
            part_best, part_total, part_acc = loaded[i]
            best, total, acc = add(
                best, total, acc, tl.full([1], part_best, tl.float32),
                tl.full([1], part_total, tl.float32), part_acc,
            )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % NUM_HEADS).to(tl.float32) * LOG2_E
        one = tl.full([1], 1.0, tl.float32)
        best, total, acc = add(best, total, acc, tl.full([1], sink, tl.float32), one, no_value)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + row * DIM + dims, out.to(out_ptr.dtype.element_ty))

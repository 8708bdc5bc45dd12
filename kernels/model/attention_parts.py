"""Merges the sums that attention makes of the splits of a row's tokens, in a kernel of its own.

The last program of a row to finish could do it, as in `paged_attention`. But it would load 16
splits of many rows alone, where all multiprocessors can share them.
"""

from torch import Tensor

from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import gl, gluon, tl, triton
from .attention_blocks import outputs_of
from .softmax_sums import add

_AHEAD = 8  # splits on their way at once
_SUMS = 512  # of a split, that a program adds up at once: of several heads
_MANY_ROWS = 128  # from here on a program does so _TIMES in turn, since it may find nothing to do
_TIMES = 4


def merge_parts(
    out: Tensor, parts: Tensor, states: Tensor, seen: Tensor, sinks: Tensor | None
) -> None:
    """Add up the parts of each row that sees several splits, in the order of the splits. Other rows
    of `out` stay as they are.

    Shape:
        out: [T, num_heads, dim]
        parts: [T, num_heads, num_splits, dim] float32, sums of values
        states: [T, num_heads, num_splits, 2] float32, their maximum and total
        seen: [T, 2] int32, the first and last split of a row
        sinks: [num_heads] or None
    """
    num_rows, num_heads, num_splits, dim = parts.shape
    heads = _SUMS // dim
    times = _TIMES if num_rows >= _MANY_ROWS else 1
    _merge_parts_kernel[(num_rows, triton.cdiv(num_heads, heads * times))](
        out, parts, states, seen, out if sinks is None else sinks, num_splits,
        NUM_HEADS=num_heads, HEADS=heads, TIMES=times, DIM=dim, AHEAD=_AHEAD,
        HAS_SINKS=sinks is not None, num_warps=4, **dependent_launch(parts.device),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_splits"])
def _merge_parts_kernel(
    out_ptr,  # [T, NUM_HEADS, DIM]
    parts_ptr,  # [T, NUM_HEADS, num_splits, DIM]
    states_ptr,  # [T, NUM_HEADS, num_splits, 2]
    seen_ptr,  # [T, 2]
    sinks_ptr,  # [NUM_HEADS], if HAS_SINKS
    num_splits,
    NUM_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    TIMES: gl.constexpr,
    DIM: gl.constexpr,
    AHEAD: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Each program: TIMES x HEADS heads of one row."""
    # Each thread has four sums of a head, and its state.
    ACROSS: gl.constexpr = min(32, DIM // 4)
    WIDE: gl.constexpr = DIM // 4 // ACROSS
    ACC: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4 // WIDE, WIDE], [1, 0])
    HEAD: gl.constexpr = gl.SliceLayout(1, ACC)
    start_next_kernel(DEPENDENT)
    row = gl.program_id(0)
    d = gl.arange(0, DIM, gl.SliceLayout(0, ACC))[None, :]
    wait_for_inputs(DEPENDENT)
    # Of rows that no sequence has, these may be any numbers.
    first_split = gl.maximum(gl.load(seen_ptr + row * 2), 0)
    last_split = gl.minimum(gl.load(seen_ptr + row * 2 + 1), num_splits - 1)
    if first_split == last_split:
        return
    for turn in range(TIMES):
        head = (gl.program_id(1) * TIMES + turn) * HEADS + gl.arange(0, HEADS, HEAD)
        is_head = head < NUM_HEADS
        out_row = row.to(gl.int64) * NUM_HEADS + head
        best = gl.full([HEADS], float("-inf"), gl.float32, HEAD)
        total = gl.zeros([HEADS], gl.float32, HEAD)
        acc = gl.zeros([HEADS, DIM], gl.float32, ACC)
        for first in range(first_split, last_split + 1, AHEAD):
            loaded = ()
            for i in gl.static_range(AHEAD):
                part, is_part = (
                    out_row * num_splits + first + i,
                    is_head & (first + i <= last_split),
                )
                part_best = gl.load(states_ptr + part * 2, mask=is_part, other=float("-inf"))
                part_total = gl.load(states_ptr + part * 2 + 1, mask=is_part, other=0.0)
                at = parts_ptr + (part * DIM)[:, None] + d
                part_acc = gl.load(at, mask=is_part[:, None], other=0.0)
                loaded += ((part_best, part_total, part_acc),)  # type: ignore[assignment]
            # Else the assembler would put sums between the loads: it moves loads over a branch,
            # whose outcome is known, and sums over a barrier, but nothing over both.
            tl.debug_barrier()
            if num_splits > 1:
                for i in gl.static_range(AHEAD):
                    part_best, part_total, part_acc = loaded[i]
                    best, total, acc = add(best, total, acc, part_best, part_total, part_acc)
        out = outputs_of(best, total, acc, sinks_ptr, head, is_head, 1.0, ACC, HAS_SINKS)
        to_ptr = out_ptr + (out_row * DIM)[:, None] + d
        gl.store(to_ptr, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None])

"""Attention of some rows over tokens that come block by block, within a kernel.

A row's state is the largest logit so far, and the total and the weighted sum of values of

    w_p = 2^(logit_p - largest),     logits in base-2 units

so that states of different tokens can be added up, and total and sum only need to be divided at the
end.
"""

from ..triton_or_none import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def no_total(BLOCK_M: tl.constexpr, SUMS: tl.constexpr):
    return tl.zeros([BLOCK_M, SUMS], tl.float32) if SUMS else tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def attend(
    query, key, value, n, position, seen_to, best, total, acc, scale, softcap, window,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Add the tokens n to the maximum, total and sum of some rows.

    Multiply-adds are explicit, because the compiler might fuse them differently in each variant of
    the kernel. The maximum is in base-2 units.
    """
    logits = tl.dot(query, key, input_precision="ieee")
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        # tanh by exp2 of a negative number, which cannot overflow.
        e = tl.exp2(tl.abs(logits) * scale * (-2.0 * LOG2_E) / softcap)
        capped = softcap * (1.0 - e) / (1.0 + e)
        logits = tl.where(logits < 0, -capped, capped)
        factor = tl.full((), LOG2_E, tl.float32)
    if MASKED:
        visible = n[None, :] <= seen_to[:, None]
        if HAS_WINDOW:
            visible &= n[None, :] > position[:, None] - window
        logits = tl.where(visible, logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, 1) * factor)
    shift = new_best
    if MASKED:
        # A row that has seen nothing yet has -inf; subtracting that would give NaN.
        shift = tl.where(new_best > float("-inf"), new_best, 0.0)
    weights = tl.exp2(tl.fma(logits, factor, -shift[:, None]))
    decay = tl.exp2(best - shift)
    rounded = weights.to(value.dtype)
    if SUMS:
        ones = tl.full([value.shape[0], SUMS], 1.0, value.dtype)
        total = tl.dot(rounded, ones, total * decay[:, None], input_precision="ieee")
    else:
        total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(rounded, value, acc * decay[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit
def add(best, total, acc, part_best, part_total, part_acc):
    """Combine the maximum, total and sum of some rows with those over other tokens."""
    new_best = tl.maximum(best, part_best)
    shift = tl.where(new_best > float("-inf"), new_best, 0.0)
    decay, part_decay = tl.exp2(best - shift), tl.exp2(part_best - shift)
    total = tl.fma(total, decay, part_total * part_decay)
    acc = tl.fma(acc, decay[:, None], part_acc * part_decay[:, None])
    return new_best, total, acc


@triton.jit
def merge(
    part_ptr, part_state_ptr, parts, first_split, last_split, value_dims, is_row, mask,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Maximum, total and sum of some rows over all splits, the first of which are `parts`."""
    best = tl.full(parts.shape, float("-inf"), tl.float32)
    total = tl.zeros(parts.shape, tl.float32)
    acc = tl.zeros(mask.shape, tl.float32)
    for split in range(first_split, last_split + 1):
        # Written by other multiprocessors, so do not read from this one's cache.
        part = parts + split
        state_ptr = part_state_ptr + part * 2
        part_best = tl.load(state_ptr, mask=is_row, other=0.0, cache_modifier=".cg")
        part_total = tl.load(state_ptr + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        at = part_ptr + part[:, None] * VALUE_DIM + value_dims
        part_acc = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        best, total, acc = add(best, total, acc, part_best, part_total, part_acc)
    return best, total, acc

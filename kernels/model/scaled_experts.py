"""Sums of products of rounded rows with an expert's matrix of 8 bits: codes times codes.

    y[t, n] = sum over groups of 128 inputs of
              scale_x[t, group] * scale_w[group, n] * sum over the group of code_x * code_w

Rows come as codes or, if they are few, as they are: each program rounds them itself then, which
takes no launch. A group's codes are the same either way.
"""

from ..dependent_launch import wait_for_inputs
from ..triton_or_none import tl, triton
from .row_codes import codes_of_groups


@triton.jit
def scaled_sums(
    x_at, x_scale_at, codes_at, scale_at, scale_stride, is_pair, NUM_IN: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Products over all inputs; with WAITS these are not there yet.

    Without `x_scale_at`, rows are not rounded yet. Shape: [BLOCK_N, BLOCK_M] float32.
    """
    NUM_GROUPS: tl.constexpr = (NUM_IN + GROUP - 1) // GROUP
    k = tl.arange(0, GROUP)
    # A group's scales are loaded while the one before is multiplied; a large tile would spill them.
    EARLY: tl.constexpr = BLOCK_M * BLOCK_N < 128 * 128
    if EARLY:
        next_scale = tl.load(scale_at)
    if WAITS:
        _into_l2(codes_at, WIDTH)
    wait_for_inputs(WAITS)
    if EARLY and x_scale_at is not None:
        next_x_scale = tl.load(x_scale_at, mask=is_pair, other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in range(NUM_GROUPS):
        at = group * GROUP + k
        if WIDTH % GROUP == 0:
            codes = tl.load(codes_at[:, None] + at[None, :])
        else:
            codes = tl.load(codes_at[:, None] + at[None, :], mask=(at < WIDTH)[None, :], other=0.0)
        if x_scale_at is None:
            inside = is_pair[:, None] & (at < NUM_IN)[None, :]
            rows = tl.load(x_at[:, None] + at[None, :], mask=inside, other=0.0)
            x, x_scale = codes_of_groups(rows.to(tl.float32), codes_at.dtype.element_ty)
            x = tl.trans(x)
        else:
            inside = is_pair[None, :] & (at < WIDTH)[:, None]
            x = tl.load(x_at[None, :] + at[:, None], mask=inside, other=0.0)
        if EARLY:
            scale = next_scale
            after = tl.minimum(group + 1, NUM_GROUPS - 1)
            next_scale = tl.load(scale_at + after * scale_stride)
            if x_scale_at is not None:
                x_scale = next_x_scale
                next_x_scale = tl.load(x_scale_at + after, mask=is_pair, other=0.0)
        else:
            scale = tl.load(scale_at + group * scale_stride)
            if x_scale_at is not None:
                x_scale = tl.load(x_scale_at + group, mask=is_pair, other=0.0)
        sums = tl.dot(codes, x)
        total = tl.fma(sums, scale.to(tl.float32)[:, None] * x_scale[None, :], total)
    return total


@triton.jit
def _into_l2(at, NUM_BYTES: tl.constexpr):
    """Have so many bytes copied into the cache that all multiprocessors share."""
    num_bytes = tl.full(at.shape, NUM_BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at, num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip

"""Sums of products of rounded rows with an expert's matrix of 8 bits: codes times codes.

y[t, n] = sum over groups of 128 inputs of
          scale_x[t, group] * scale_w[group, n] * sum over the group of code_x * code_w
"""

from ..dependent_launch import wait_for_inputs
from ..triton_or_none import tl, triton


@triton.jit
def scaled_sums(
    x_at, x_scale_at, codes_at, scale_at, scale_stride, is_pair, NUM_IN: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Products over all inputs; with WAITS these are not there yet. Where there is no pair, `x_at`
    and `x_scale_at` are those of any row.

    Shape: [BLOCK_N, BLOCK_M] float32.
    """
    NUM_GROUPS: tl.constexpr = (NUM_IN + GROUP - 1) // GROUP
    # A group is multiplied sooner than memory answers. So scales are loaded before: all of them if
    # they are few, else those of a group while the one before is multiplied. A large tile would
    # spill them.
    ALL: tl.constexpr = BLOCK_M <= 32 and NUM_GROUPS <= 8
    NEXT: tl.constexpr = not ALL and BLOCK_M * BLOCK_N < 128 * 128
    NUM_EARLY: tl.constexpr = NUM_GROUPS if ALL else (1 if NEXT else 0)
    scales = _of_groups(scale_at, scale_stride, NUM_EARLY)
    wait_for_inputs(WAITS)
    x_scales = _of_groups(x_scale_at, 1, NUM_EARLY)
    if NEXT:
        next_scale, next_x_scale = scales[0], x_scales[0]
    k = tl.arange(0, GROUP)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in range(NUM_GROUPS):
        at = group * GROUP + k
        inside = is_pair[None, :] & (at < WIDTH)[:, None]
        if WIDTH % GROUP == 0:
            codes = tl.load(codes_at[:, None] + at[None, :])
        else:
            codes = tl.load(codes_at[:, None] + at[None, :], mask=(at < WIDTH)[None, :], other=0.0)
        x = tl.load(x_at[None, :] + at[:, None], mask=inside, other=0.0)
        if ALL:
            scale, x_scale = scales[0], x_scales[0]
            for i in tl.static_range(1, NUM_GROUPS):
                scale = tl.where(group == i, scales[i], scale)
                x_scale = tl.where(group == i, x_scales[i], x_scale)
        elif NEXT:
            scale, x_scale = next_scale, next_x_scale
            after = tl.minimum(group + 1, NUM_GROUPS - 1)
            next_scale = tl.load(scale_at + after * scale_stride)
            next_x_scale = tl.load(x_scale_at + after)
        else:
            scale = tl.load(scale_at + group * scale_stride)
            x_scale = tl.load(x_scale_at + group)
        sums = tl.dot(codes, x)
        total = tl.fma(sums, scale.to(tl.float32)[:, None] * x_scale[None, :], total)
    return total


@triton.jit
def _of_groups(at, stride, COUNT: tl.constexpr):
    """What lies there of the first COUNT groups."""
    values = ()
    for group in tl.static_range(COUNT):
        value = tl.load(at + group * stride)
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return values

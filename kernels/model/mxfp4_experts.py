"""Sums of products with an expert's matrix in MXFP4.

Codes go from memory straight into the registers of the threads that multiply by them, those of the
next steps while some are multiplied. The scale is in the number that a code becomes: it is a power
of two, so the number stays exact.
"""

from ..dependent_launch import wait_for_inputs
from ..triton_or_none import tl, triton
from .e2m1 import scaled_from_e2m1, unscaled
from .narrow_numbers import in_order_by_warp
from .narrow_product import codes_of_steps


@triton.jit
def mxfp4_sums(
    x_at, codes_at, scale_at, is_pair, is_read, NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, IN_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Products over all inputs; with WAITS these are not there yet.

    Shape: [BLOCK_N, BLOCK_M] float32.
    """
    STEP: tl.constexpr = 32  # bytes, and inputs of a group
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    codes = codes_of_steps(codes_at, is_read, 0, WIDTH, STEP, STEPS, STEP)
    scales = _exponents(scale_at, 0, NUM_ROWS, 2 * STEPS)
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_inputs(WAITS)
    last = WIDTH - STEPS * STEP
    for start in range(0, WIDTH, STEPS * STEP):
        now, scales_now = codes, scales
        after = start + STEPS * STEP
        codes = codes_of_steps(codes_at, is_read & (after < WIDTH), after, WIDTH, STEP, STEPS, STEP)
        scales = _exponents(scale_at, tl.minimum(after, last) // STEP * 2, NUM_ROWS, 2 * STEPS)
        for step in tl.static_range(STEPS):
            low = scaled_from_e2m1(now[step], scales_now[2 * step], False, DTYPE, IN_PAIRS)
            low = in_order_by_warp(low, BLOCK_N, STEP, WARPS)
            at = x_at + 2 * (start + step * STEP)
            if STEPS > 1:
                high = scaled_from_e2m1(now[step], scales_now[2 * step + 1], True, DTYPE, IN_PAIRS)
                high = in_order_by_warp(high, BLOCK_N, STEP, WARPS)
                both = tl.permute(tl.join(low, high), (0, 2, 1))
                weight = tl.reshape(both, [BLOCK_N, 2 * STEP])
                x = tl.load(at + tl.arange(0, 2 * STEP)[:, None], mask=is_pair, other=0.0)
                y = tl.dot(weight, x, y, input_precision="ieee")
            else:
                # Triton lets a turn's last product run on into the next turn, with weights in
                # registers. If these are converted before a wait, ptxas overwrites them in the next
                # turn before they are multiplied (seen as NaN with Triton 3.6; 3.7 does it as
                # well). So there must be two products, and the second converts after the first.
                x = tl.load(at + tl.arange(0, STEP)[:, None], mask=is_pair, other=0.0)
                y = tl.dot(low, x, y, input_precision="ieee")
                high = scaled_from_e2m1(now[step], scales_now[2 * step + 1], True, DTYPE, IN_PAIRS)
                high = in_order_by_warp(high, BLOCK_N, STEP, WARPS)
                x = tl.load(at + STEP + tl.arange(0, STEP)[:, None], mask=is_pair, other=0.0)
                y = tl.dot(high, x, y, input_precision="ieee")
    return unscaled(y)


@triton.jit
def _exponents(at, first, NUM_ROWS: tl.constexpr, COUNT: tl.constexpr):
    """The scales of COUNT groups, each [outputs]."""
    values = ()
    for i in tl.static_range(COUNT):
        value = tl.load(at + first * NUM_ROWS + i * NUM_ROWS)
        values = values + (value.to(tl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return values

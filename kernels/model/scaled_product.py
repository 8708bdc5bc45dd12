"""Products of rounded rows with a narrow matrix of 8 bits: codes times codes, on tensor cores.

    y[t, n] = sum over groups of scale_x[t] * scale_w[n] * sum over the group of code_x * code_w

Nothing is converted, so many rows take half the time of 16-bit numbers. An output is summed in one
order, however many rows there are, and whether the kernel for any GPU multiplies them, here, or one
for Hopper GPUs: `block_scaled_few_rows`, `block_scaled_product`, `row_scaled_few_rows`,
`row_scaled_product`. Tensor cores add products of e4m3 with some 14 bits, as the library does for
speed: an error of 0.3% of a result, a tenth of what rounding its inputs costs.
"""

from torch import Tensor

from .._dispatch import num_programs, num_stages_of
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .block_scaled_few_rows import FEW_ROWS, block_scaled_few_rows
from .block_scaled_product import block_scaled_product, is_for
from .many_rows_tiles import BLOCK_ROWS
from .narrow_matrix import NarrowMatrix
from .row_codes import RowCodes
from .row_scaled_few_rows import MOST_ROWS, row_scaled_few_rows
from .row_scaled_product import is_for as is_for_rows
from .row_scaled_product import row_scaled_product
from .silu_mul import silu
from .tiles import BLOCK_N, MAX_SPLIT_ROWS, num_splits_of, tile_of_program

_BLOCK_K = 128
_AHEAD = 512  # inputs whose codes a program loads before its rows are there
_AHEAD_ROWS = 32  # with more rows it does not: registers and shared memory hold no more
_MANY_ROWS = 256  # more of them are multiplied in larger tiles
_TOGETHER = tl.constexpr(8)  # blocks of outputs whose programs run together and share rows of x


def parts_of(matrix: NarrowMatrix) -> int:
    """How many parts a product is split into."""
    num_out, width = matrix.codes.shape
    least, device = 2 * _BLOCK_K, matrix.codes.device
    return num_splits_of(
        num_out, width, device, multiple=least, least=least, per_sm=_per_sm(matrix)
    )


def _per_sm(matrix: NarrowMatrix) -> int:
    """How many programs a multiprocessor should have, at few rows."""
    # A program waits for the sums of each group to scale them; others multiply then.
    return 3 if len(matrix.scale) > 1 else 1


def most_rows_in_parts(matrix: NarrowMatrix) -> int:
    """With more rows, a product is faster added as a whole than in parts."""
    # With fewer than it has at once, a program of `block_scaled_product` computes for nothing.
    is_fast = is_for(matrix, num_splits=parts_of(matrix))
    return BLOCK_ROWS if is_fast else MAX_SPLIT_ROWS


def scaled_product(
    out: Tensor,
    x: RowCodes,
    matrix: NarrowMatrix,
    bias: Tensor | None = None,
    *,
    num_splits: int = 1,
    gated: bool = False,
    adds: bool = False,
) -> None:
    """Store the product in `out` or, with `adds`, add it there; three dimensions take its parts.

    The parts are those of `num_splits` shares of the inputs.
    Shape: out [T, N] or, gated, [T, N / 2], or parts [num_splits, T, N] float32, dense
    """
    assert out.is_contiguous()
    num_rows, width = x.codes.shape
    num_out = out.shape[-1]
    is_whole = out.ndim == 2
    if is_for(matrix, num_splits=num_splits, gated=gated):
        if num_rows > FEW_ROWS and is_whole:
            block_scaled_product(
                out, x, matrix, bias, num_splits=num_splits, gated=gated, adds=adds
            )
            return
        if num_rows <= FEW_ROWS and not adds and (num_splits == 1 or not is_whole):
            block_scaled_few_rows(out, x, matrix, bias, num_splits=num_splits, gated=gated)
            return
    share, num_groups = width // num_splits, len(matrix.scale)
    is_even = share % _BLOCK_K == 0
    # Whether or not they are loaded ahead, these are summed last: any tile must sum in one order.
    last = _AHEAD if is_even and share > _AHEAD and num_groups == 1 else 0
    if num_rows > _AHEAD_ROWS and is_for_rows(matrix, num_splits=num_splits):
        if num_rows > MOST_ROWS and is_whole:
            row_scaled_product(
                out, x, matrix, bias, num_splits=num_splits, last=last, gated=gated, adds=adds
            )
            return
        if num_rows <= MOST_ROWS and not adds and (num_splits == 1 or not is_whole):
            row_scaled_few_rows(out, x, matrix, bias, num_splits=num_splits, last=last, gated=gated)
            return
    ahead = last if num_rows <= _AHEAD_ROWS else 0
    tile = _tile(num_rows, matrix, num_splits, ahead, has_two_sums=adds or num_groups > 1)
    num_tiles = triton.cdiv(num_out, tile["BLOCK_N"] // (2 if gated else 1)) * triton.cdiv(
        num_rows, tile["BLOCK_M"]
    )
    _scaled_kernel[num_tiles, 1 if is_whole else num_splits](
        out, x.codes, x.scale, matrix.codes, matrix.scale, bias, num_rows, num_out, width, share,
        matrix.scale.stride(0),
        EVEN=is_even, LAST=last, AHEAD=ahead > 0, GROUP=matrix.group if num_groups > 1 else 0,
        NUM_GROUPS=num_groups, ROWS=matrix.rows, SPLITS=num_splits if is_whole else 1, GATED=gated,
        ADDS=adds,
        enable_fp_fusion=False,  # otherwise only some tiles would round a scaled sum
        **tile, **dependent_launch(x.codes.device),
    )  # fmt: skip


def _tile(
    num_rows: int, matrix: NarrowMatrix, num_splits: int, ahead: int, *, has_two_sums: bool
) -> dict[str, int]:
    """Block sizes, warps, and how many blocks a program loads ahead; no sum depends on these."""
    # Measured on an H200.
    block_m, block_n, num_warps, num_stages = 128, 128, 8, 5
    if num_rows <= 128:
        at_once = num_programs(matrix.codes.device, 1)  # with so many, each loads far ahead
        programs = triton.cdiv(len(matrix.codes), BLOCK_N) * num_splits
        if num_rows <= 64:
            block_m, block_n, num_warps = max(16, triton.next_power_of_2(num_rows)), BLOCK_N, 4
            num_stages = 8 if programs <= at_once else 6 if block_m < 64 else 4
        elif programs <= _per_sm(matrix) * at_once:
            block_n, num_warps, num_stages = BLOCK_N, 4, 6 if programs <= at_once else 4
        elif programs <= 4 * at_once and not has_two_sums:  # registers hold one of this size
            block_n, num_stages = 4 * BLOCK_N, 4
    elif num_rows > _MANY_ROWS and not has_two_sums:
        block_m, num_stages = 256, 3
    stage_bytes = (block_m + block_n) * _BLOCK_K
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": _BLOCK_K,
        "num_warps": num_warps,
        "num_stages": num_stages_of(
            num_stages, stage_bytes, matrix.codes.device, (block_m + block_n) * ahead
        ),
    }


@triton.jit(do_not_specialize=["num_rows"])
def _scaled_kernel(
    out_ptr,  # [num_rows, num_out], or parts [splits, num_rows, num_out] float32
    x_ptr,  # [num_rows, width]
    x_scale_ptr,  # [num_rows, NUM_GROUPS]
    codes_ptr,  # [num_out or 2 * num_out, width]
    scale_ptr,  # [NUM_GROUPS, num_out / ROWS]
    bias_ptr,  # [num_out or 2 * num_out] or None
    num_rows,
    num_out,
    width,
    share,  # of the inputs, which one sum is of
    scale_stride,
    EVEN: tl.constexpr,  # whether blocks divide a share
    LAST: tl.constexpr,  # how many of a share's first inputs are summed last
    AHEAD: tl.constexpr,  # whether their codes are loaded before the rows are there
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: BLOCK_N outputs of BLOCK_M rows, over SPLITS shares of the inputs in turn."""
    start_next_kernel(DEPENDENT)
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    block, row_block = tile_of_program(
        tl.program_id(0), tl.cdiv(num_out, OUTS), tl.cdiv(num_rows, BLOCK_M), _TOGETHER
    )
    split = tl.program_id(1)
    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_N)
    n = block * OUTS + i % OUTS
    is_row, is_out = m < num_rows, n < num_out
    # If gated, the second half of a block holds the rows of `up` that match the gate's rows.
    weight_row = n + i // OUTS * num_out
    x_at = x_ptr + m.to(tl.int64)[None, :] * width
    codes_at = codes_ptr + weight_row.to(tl.int64)[:, None] * width
    x_scale_at = x_scale_ptr + m * NUM_GROUPS
    scale_at = scale_ptr + weight_row // ROWS
    out_at = out_ptr + (split * num_rows + m).to(tl.int64)[None, :] * num_out
    total = _share(
        x_at, x_scale_at, codes_at, scale_at, scale_stride, is_row, is_out, split * share,
        share, EVEN, LAST, AHEAD, GROUP, NUM_GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, DEPENDENT,
    )  # fmt: skip
    if ADDS:
        mask = is_row[None, :] & is_out[:, None]
        total += tl.load(out_at + n[:, None], mask=mask, other=0.0).to(tl.float32)
    for each in tl.static_range(1, SPLITS):
        total += _share(
            x_at, x_scale_at, codes_at, scale_at, scale_stride, is_row, is_out, each * share,
            share, EVEN, LAST, False, GROUP, NUM_GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, False,
        )  # fmt: skip
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_row, mask=is_out, other=0.0).to(tl.float32)
        total += bias[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTS, BLOCK_M]), (1, 2, 0)))
        total = silu(gate) * up
        n = block * OUTS + tl.arange(0, OUTS)
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_at + n[:, None], total, mask=is_row[None, :] & (n < num_out)[:, None])


@triton.jit
def _share(
    x_at, x_scale_at, codes_at, scale_at, scale_stride, is_row, is_out, begin,
    share, EVEN: tl.constexpr, LAST: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Products over one share of the inputs; with WAITS the rows are not there yet.

    Shape: [BLOCK_N, BLOCK_M] float32.
    """
    CODE: tl.constexpr = codes_at.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if tl.int8 == CODE else tl.float32
    k = tl.arange(0, BLOCK_K)
    if AHEAD:
        first = tl.arange(0, LAST)
        codes_ahead = tl.load(codes_at + begin + first[None, :], mask=is_out[:, None], other=0.0)
    # A block's scales are loaded while the one before is multiplied; a large tile would spill them.
    EARLY: tl.constexpr = NUM_GROUPS > 1 and BLOCK_M * BLOCK_N < 128 * 128
    end = begin + share
    if EARLY:
        next_scale = _scale_of(scale_at, scale_stride, is_out, begin, GROUP)
    wait_for_inputs(WAITS)
    if EARLY:
        next_x_scale = _scale_of(x_scale_at, 1, is_row, begin, GROUP)
    if AHEAD:
        x_ahead = tl.load(x_at + begin + first[:, None], mask=is_row[None, :], other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_M], SUM if NUM_GROUPS == 1 else tl.float32)
    for place in range(LAST, share if AHEAD else share + LAST, BLOCK_K):
        start = begin + place
        if LAST > 0:
            start = tl.where(place < share, start, start - share)
        in_x, in_codes = is_row[None, :], is_out[:, None]
        if not EVEN:
            inside = start + k < begin + share
            in_x, in_codes = in_x & inside[:, None], in_codes & inside[None, :]
        x = tl.load(x_at + (start + k)[:, None], mask=in_x, other=0.0)
        codes = tl.load(codes_at + (start + k)[None, :], mask=in_codes, other=0.0)
        if NUM_GROUPS == 1:
            total = tl.dot(codes, x, total, out_dtype=SUM)
        else:
            if EARLY:
                scale, x_scale, after = next_scale, next_x_scale, start + BLOCK_K
                next_scale = _scale_of(scale_at, scale_stride, is_out & (after < end), after, GROUP)
                next_x_scale = _scale_of(x_scale_at, 1, is_row & (after < end), after, GROUP)
            else:
                scale = _scale_of(scale_at, scale_stride, is_out, start, GROUP)
                x_scale = _scale_of(x_scale_at, 1, is_row, start, GROUP)
            part = tl.dot(codes, x, out_dtype=SUM)
            both = scale.to(tl.float32)[:, None] * x_scale[None, :]
            total = tl.fma(part.to(tl.float32), both, total)
    if AHEAD:
        total = tl.dot(codes_ahead, x_ahead, total, out_dtype=SUM)
    if NUM_GROUPS == 1:
        x_scale = tl.load(x_scale_at, mask=is_row, other=0.0)
        scale = tl.load(scale_at, mask=is_out, other=0.0).to(tl.float32)
        total = total.to(tl.float32) * scale[:, None] * x_scale[None, :]
    return total


@triton.jit
def _scale_of(at, stride, mask, start, GROUP: tl.constexpr):
    """The scales of the group that an input belongs to."""
    return tl.load(at + start // GROUP * stride, mask=mask, other=0.0)

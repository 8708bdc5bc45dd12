"""Products of many rows on a Hopper GPU that end with more than the library's do:

    y = silu(gate) * up     of both halves of x W^T,     or     y += x W^T, by shares of the inputs

What the library multiplies is written, and read again to be gated or, in float32, to be added up;
here that is done while it is in registers. A program has two warpgroups of 64 rows each, and a warp
that copies rows and weights into shared memory some blocks ahead. A block's product starts while
that of the block before is under way. An output is summed in the same order as among few rows, and
halves are rounded before the gate as there, so bits are the same.
"""

from torch import Tensor

from .._dispatch import num_programs
from ..triton_or_none import TensorDescriptor, gl, gluon, hopper, triton
from .many_rows_tiles import BLOCK_ROWS, ROWS, copy_tiles, in_halves, sums_of_share, tiles_of
from .rms_norm import rounded
from .silu_mul import silu
from .tiles import tile_of_program
from .warpgroups import descriptor_of, has_warpgroups

tma = hopper.tma

_BLOCK = gl.constexpr(64)  # inputs that are copied at once
_OUTS = gl.constexpr(256)  # rows of the weight in a tile
_STORED = gl.constexpr(128)  # outputs that are stored at once
_TOGETHER = gl.constexpr(16)  # blocks of rows whose programs run together and share the weight
# How much of what programs compute must be of use: with less, the library is faster. Measured on an
# H200: with 0.85 to 0.92 it takes 0.69 to 1.06 of the library's time, with 0.95 less than that.
_LEAST_USE = 0.85


def is_for(weight: Tensor, *, num_splits: int) -> bool:
    """Whether it multiplies by such a weight. Shape: [N, K] or, for a gate, [2 N, K], dense."""
    num_out, num_in = weight.shape
    return (
        weight.element_size() == 2
        and num_out % 16 == 0
        and num_in % (_BLOCK.value * num_splits) == 0
        and has_warpgroups(weight.device)
    )


def is_ahead(x: Tensor, weight: Tensor) -> bool:
    """Whether it is faster than the library, and what follows that."""
    num_tiles, most_programs = _num_tiles(len(x), len(weight)), num_programs(x.device, 1)
    turns: int = triton.cdiv(num_tiles, most_programs)
    computed = turns * most_programs * BLOCK_ROWS * _OUTS.value
    is_aligned = x.stride(0) * x.element_size() % 16 == x.data_ptr() % 16 == 0
    return len(x) * len(weight) >= _LEAST_USE * computed and is_aligned


def many_rows_product(
    out: Tensor, x: Tensor, weight: Tensor, *, gated: bool = False, num_splits: int = 1
) -> None:
    """Store silu(gate) * up in `out` or, if not `gated`, add the product there.

    It is added share by share of `num_splits` of the inputs, as `add_parts` adds parts.
    Shape: out [T, N] dense, x [T, K], rows dense, weight [N, K] or, gated, [2 N, K]; `is_for` must
    hold
    """
    assert out.is_contiguous()
    assert not gated or num_splits == 1
    num_rows, num_out = out.shape
    x_rows, weights = descriptor_of(x, ROWS.value), descriptor_of(weight, _OUTS.value // 2)
    outs = TensorDescriptor.from_tensor(
        out, [ROWS.value, _STORED.value], gl.NVMMASharedLayout(128, 16)
    )
    programs = min(num_programs(x.device, 1), _num_tiles(num_rows, len(weight)))
    _many_rows_kernel[(programs,)](
        out, outs, x_rows, weights, num_rows, num_out, x.shape[1] // _BLOCK.value // num_splits,
        num_splits, STAGES=4 if gated else 3, GATED=gated, num_warps=4,
    )  # fmt: skip


def _num_tiles(num_rows: int, height: int) -> int:
    """Of so many rows, and of a weight of this height."""
    num_tiles: int = triton.cdiv(num_rows, BLOCK_ROWS) * triton.cdiv(height, _OUTS.value)
    return num_tiles


@gluon.jit
def _store(values, staged, outs, first_row, first_out):
    """Have [64, 128] outputs stored, by way of shared memory."""
    staged.store(values)
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(outs, [first_row, first_out], staged)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, out_ptr, outs, tiles, kept, staged, num_rows, num_out, share, num_splits,
    STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The first or second 64 rows of all tiles. One warpgroup."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _OUTS, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _STORED, 16])
    TILE_OUTS: gl.constexpr = _OUTS // 2 if GATED else _OUTS
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    num_m, num_n = gl.cdiv(num_rows, 2 * ROWS), gl.cdiv(num_out, TILE_OUTS)
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        row_block, block = tile_of_program(tile, num_m, num_n, _TOGETHER)
        first_row, first_out = (2 * row_block + WHICH) * ROWS, block * TILE_OUTS
        sums, step = sums_of_share(WHICH, step, share, tiles, STAGES, _OUTS, ACC)
        tma.store_wait(0)  # of the tile before, whose shared memory is used again
        if GATED:
            # Rounded first, as the library rounds both halves.
            gate, up = in_halves(rounded(sums, dtype).to(gl.float32), _OUTS)
            _store((silu(gate) * up).to(dtype), staged.index(WHICH), outs, first_row, first_out)
        else:
            m = (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, ACC)))[:, None]
            n = (first_out + gl.arange(0, _OUTS, gl.SliceLayout(0, ACC)))[None, :]
            at = out_ptr + m.to(gl.int64) * num_out + n
            before = gl.load(at, mask=(m < num_rows) & (n < num_out), other=0.0)
            left, right = in_halves(before.to(gl.float32) + sums, _OUTS)
            right = gl.convert_layout(right, HALF, assert_trivial=True)
            for _ in range(1, num_splits):
                # Registers hold no whole total beside the sums of a share.
                kept.index(WHICH).store(right)
                sums, step = sums_of_share(WHICH, step, share, tiles, STAGES, _OUTS, ACC)
                more_left, more_right = in_halves(sums, _OUTS)
                left += more_left
                right = kept.index(WHICH).load(HALF)
                right += gl.convert_layout(more_right, HALF, assert_trivial=True)
            _store(left.to(dtype), staged.index(2 * WHICH), outs, first_row, first_out)
            _store(
                right.to(dtype), staged.index(2 * WHICH + 1), outs, first_row, first_out + _STORED
            )
    tma.store_wait(0)


# One form for any number of shares: unrolled, four of them would spill registers.
@gluon.jit(do_not_specialize=["num_rows", "share", "num_splits"])
def _many_rows_kernel(
    out_ptr,  # [num_rows, num_out]
    outs,  # the same: a descriptor
    x_rows,  # [num_rows, num_splits * share * 64]: a descriptor
    weights,  # [num_out or, gated, 2 * num_out, num_splits * share * 64]: a descriptor
    num_rows,
    num_out,
    share,  # blocks of inputs that one sum is of
    num_splits,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Each program strides over the tiles, all its warps in step."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    tiles = tiles_of(dtype, _BLOCK, STAGES, _OUTS)
    if GATED:
        staged = gl.allocate_shared_memory(dtype, [2, ROWS, _STORED], TILE)
        kept = staged  # not used
    else:
        kept = gl.allocate_shared_memory(
            gl.float32, [2, ROWS, _STORED], gl.SwizzledSharedLayout(8, 1, 16, [1, 0])
        )
        staged = kept._reinterpret(dtype, [4, ROWS, _STORED], TILE)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, out_ptr, outs, tiles, kept, staged, num_rows, num_out, share, num_splits,
                STAGES, GATED)),
            (_multiply, (
                1, out_ptr, outs, tiles, kept, staged, num_rows, num_out, share, num_splits,
                STAGES, GATED)),
            (copy_tiles, (
                (x_rows, weights), tiles, num_rows, num_out, num_splits * share, share, _BLOCK,
                STAGES, _OUTS, 0, GATED, _TOGETHER)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

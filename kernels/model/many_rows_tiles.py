"""What products of many rows share on a Hopper GPU: two warpgroups of 64 rows each, and a warp that
copies rows and weights into shared memory some blocks of inputs ahead.
"""

from ..triton_or_none import gl, gluon, hopper
from .tiles import tile_of_program
from .warpgroups import barriers_of

mbarrier, tma = hopper.mbarrier, hopper.tma

BLOCK_ROWS = 128  # of a program, half of them of each warpgroup
ROWS = gl.constexpr(BLOCK_ROWS // 2)
_BYTES = gl.constexpr(128)  # of a block of inputs


@gluon.jit
def tiles_of(code: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr):
    """Shared memory of rows, for each warpgroup, and of weights, in halves as they are copied and
    whole; and barriers: a stage has them, or is free of them for both warpgroups.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 1024 // BLOCK)
    x_tiles = gl.allocate_shared_memory(code, [2 * STAGES, ROWS, BLOCK], CODES)
    halves = gl.allocate_shared_memory(code, [2 * STAGES, OUTS // 2, BLOCK], CODES)
    w_tiles = halves._reinterpret(code, [STAGES, OUTS, BLOCK], CODES)
    return x_tiles, halves, w_tiles, barriers_of(STAGES, 1), barriers_of(STAGES, 2)


@gluon.jit
def copy_tiles(
    descriptors, tiles, num_rows, num_out, num_blocks, share, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, OUTS: gl.constexpr, LAST: gl.constexpr, GATED: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """Have all tiles of a program copied, block by block. One warp.

    Of each share's first blocks LAST come last. TOGETHER is as in `tile_of_program`.
    """
    x_rows, weights = descriptors
    x_tiles, halves, _, has, free = tiles
    HALF: gl.constexpr = OUTS // 2
    STORED: gl.constexpr = HALF if GATED else OUTS
    num_m, num_n = gl.cdiv(num_rows, 2 * ROWS), gl.cdiv(num_out, STORED)
    # If gated, the second half holds the rows of `up` that match the gate's rows.
    half = num_out if GATED else HALF
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        row_block, block = tile_of_program(tile, num_m, num_n, TOGETHER)
        for turn in range(num_blocks):
            k = turn * BLOCK
            if LAST > 0:
                k = (turn - turn % share + (turn + LAST) % share) * BLOCK
            stage, phase = step % STAGES, step // STAGES & 1
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(has.index(stage), (2 * ROWS + OUTS) * _BYTES)
            for i in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_rows, [(2 * row_block + i) * ROWS, k], has.index(stage),
                    x_tiles.index(2 * stage + i),
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    weights, [block * STORED + i * half, k], has.index(stage),
                    halves.index(2 * stage + i),
                )  # fmt: skip
            step += 1


@gluon.jit
def sums_of_share(
    WHICH: gl.constexpr, step, share, tiles, STAGES: gl.constexpr, OUTS: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """Products of a share's blocks, one of which is always under way. Shape: [ROWS, OUTS]"""
    x_tiles, _, w_tiles, has, free = tiles
    sums = gl.zeros([ROWS, OUTS], gl.float32, ACC)
    stage = step % STAGES
    mbarrier.wait(has.index(stage), step // STAGES & 1)
    sums = hopper.warpgroup_mma(
        x_tiles.index(2 * stage + WHICH), w_tiles.index(stage).permute((1, 0)), sums,
        use_acc=False, is_async=True,
    )  # fmt: skip
    sums = hopper.warpgroup_mma_wait(1, deps=[sums])
    step += 1
    for _ in range(1, share):
        before, stage = stage, step % STAGES
        mbarrier.wait(has.index(stage), step // STAGES & 1)
        sums = hopper.warpgroup_mma(
            x_tiles.index(2 * stage + WHICH), w_tiles.index(stage).permute((1, 0)), sums,
            is_async=True,
        )  # fmt: skip
        sums = hopper.warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(free.index(before), count=1)
        step += 1
    sums = hopper.warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index(stage), count=1)
    return sums, step


@gluon.jit
def in_halves(total, OUTS: gl.constexpr):
    """The left and the right half of a tile. Shape: [ROWS, OUTS / 2] each"""
    return gl.split(gl.permute(gl.reshape(total, [ROWS, 2, OUTS // 2]), (0, 2, 1)))

"""Keys and values of a prompt's attention, block by block, in the shared memory of a Hopper GPU.

For the warps of `prompt_attention` that load while others compute.
"""

from ..triton_or_none import gl, gluon, hopper
from .attention_items import WIDTH
from .fp8 import from_e4m3

mbarrier, tma = hopper.mbarrier, hopper.tma

BLOCK = gl.constexpr(64)  # tokens
AHEAD = gl.constexpr(2)  # blocks in FP8 that are on their way


@gluon.jit
def item_of(turn):
    """The item of a program's turn: they come longest first, so every other round goes back."""
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return turn * gl.num_programs(0) + place


@gluon.jit
def tokens_of(item_ptr, window, HAS_WINDOW: gl.constexpr):
    """The first and last token that any row of an item sees, and the start of the first block."""
    first_position = gl.load(item_ptr + 2)
    begin = 0
    if HAS_WINDOW:
        begin = gl.maximum(first_position - window + 1, 0)
    return begin, first_position + gl.load(item_ptr + 1), begin // BLOCK * BLOCK


@gluon.jit
def _copy(
    cache, parts, barrier, stage, pages_ptr, start, end, column,
    DIM: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Have a block copied into a stage, by the tensor memory accelerator; the barrier notes it."""
    PART: gl.constexpr = parts.shape[1]
    SPAN: gl.constexpr = parts.shape[2]
    mbarrier.expect(barrier, BLOCK * DIM * (parts.dtype.primitive_bitwidth // 8))
    for i in gl.static_range(BLOCK // PART):
        n = start + i * PART
        row = gl.load(pages_ptr + n // PAGE, mask=n < end, other=0) * PAGE + n % PAGE
        for j in gl.static_range(DIM // SPAN):
            part = parts.index((stage * (DIM // SPAN) + j) * (BLOCK // PART) + i)
            tma.async_copy_global_to_shared(cache, [row, column + j * SPAN], barrier, part)


@gluon.jit
def _convert(codes, tile, free, has, phase, CODES: gl.constexpr):
    """Convert a block into its tile, once that is free."""
    numbers = from_e4m3(codes.load(CODES), tile.dtype)
    mbarrier.wait(free, phase ^ 1)
    tile.store(numbers)
    hopper.fence_async_shared()
    mbarrier.arrive(has, count=1)


@gluon.jit
def load_blocks(
    caches, block_table_ptr, block_table_stride, work, parts, copied, codes, tiles, has, free,
    NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, IN_FP8: gl.constexpr,
):  # fmt: skip
    """Have the keys and values of all items copied, and convert them from FP8 if they are in it.

    One warp, or a warpgroup.
    """
    items_ptr, num_items, window = work
    block = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < num_items:
            column = item % NUM_KV_HEADS * DIM
            item_ptr = items_ptr + item // NUM_KV_HEADS * WIDTH
            pages_ptr = block_table_ptr + gl.load(item_ptr + 3).to(gl.int64) * block_table_stride
            _, end, first = tokens_of(item_ptr, window, HAS_WINDOW)
            num_blocks = (end - first + BLOCK - 1) // BLOCK
            if IN_FP8:
                CODES: gl.constexpr = gl.BlockedLayout(
                    [1, 16], [512 // DIM, DIM // 16], [4, 1], [1, 0]
                )
                for i in range(num_blocks + AHEAD):
                    slot = (block + i) % AHEAD
                    if i >= AHEAD:
                        done = block + i - AHEAD
                        stage, phase = done % STAGES, done // STAGES & 1
                        for which in gl.static_range(2):
                            mbarrier.wait(copied[which].index(slot), done // AHEAD & 1)
                            _convert(
                                codes[which].index(slot), tiles[which].index(stage),
                                free[which].index(stage), has[which].index(stage), phase, CODES,
                            )  # fmt: skip
                    if i < num_blocks:
                        for which in gl.static_range(2):
                            _copy(
                                caches[which], parts[which], copied[which].index(slot), slot,
                                pages_ptr, first + i * BLOCK, end, column, DIM, PAGE,
                            )  # fmt: skip
            else:
                for i in range(num_blocks):
                    stage, phase = (block + i) % STAGES, (block + i) // STAGES & 1
                    for which in gl.static_range(2):
                        mbarrier.wait(free[which].index(stage), phase ^ 1)
                        _copy(
                            caches[which], parts[which], has[which].index(stage), stage,
                            pages_ptr, first + i * BLOCK, end, column, DIM, PAGE,
                        )  # fmt: skip
            block += num_blocks

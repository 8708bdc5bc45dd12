"""Keys and values of attention, block by block, in the shared memory of a Hopper GPU.

Some warps of a program load them, and warpgroups compute with them meanwhile: in `prompt_attention`
and `few_rows_attention`.
"""

from ..triton_or_none import gl, gluon, hopper
from .attention_items import WIDTH
from .fp8 import from_e4m3
from .softmax_sums import LOG2_E, add

mbarrier, tma = hopper.mbarrier, hopper.tma

BLOCK = gl.constexpr(64)  # tokens
SUMS = gl.constexpr(8)  # columns of a product with ones: the fewest that tensor cores can do
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
def copy_block(
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
                            copy_block(
                                caches[which], parts[which], copied[which].index(slot), slot,
                                pages_ptr, first + i * BLOCK, end, column, DIM, PAGE,
                            )  # fmt: skip
            else:
                for i in range(num_blocks):
                    stage, phase = (block + i) % STAGES, (block + i) // STAGES & 1
                    for which in gl.static_range(2):
                        mbarrier.wait(free[which].index(stage), phase ^ 1)
                        copy_block(
                            caches[which], parts[which], has[which].index(stage), stage,
                            pages_ptr, first + i * BLOCK, end, column, DIM, PAGE,
                        )  # fmt: skip
            block += num_blocks


@gluon.jit
def weights_of(
    logits, start, position, first_position, last_position, best, factor, window,
    LOGITS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A block's weights, the new maximum, and what the sums so far are to be multiplied with."""
    is_masked = start + BLOCK > first_position + 1
    if HAS_WINDOW:
        is_masked |= start <= last_position - window
    if is_masked:
        n = start + gl.arange(0, BLOCK, gl.SliceLayout(0, LOGITS))[None, :]
        visible = n <= position[:, None]
        if HAS_WINDOW:
            visible &= n > position[:, None] - window
        logits = gl.where(visible, logits, float("-inf"))
    new_best = gl.maximum(best, gl.max(logits, 1) * factor)
    # A row that has seen nothing yet has -inf; subtracting that would give NaN.
    shift = gl.where(new_best > float("-inf"), new_best, 0.0)
    weights = gl.exp2(gl.fma(logits, factor, -shift[:, None]))
    return weights, new_best, gl.exp2(best - shift)


@gluon.jit
def without_strangers(tile, start, begin, end, LOADED: gl.constexpr):
    """Zero the values of tokens that no row sees: 0 times NaN would be NaN.

    If several warpgroups do, that is harmless.
    """
    if (start < begin) | (start + BLOCK > end):
        n = start + gl.arange(0, BLOCK, gl.SliceLayout(1, LOADED))
        is_seen = (n >= begin) & (n < end)
        tile.store(gl.where(is_seen[:, None], tile.load(LOADED), 0.0))
        hopper.fence_async_shared()


@gluon.jit
def add_weights(rounded, total, TOTAL: gl.constexpr):
    """Add a block's weights to their totals, which are equal in all columns.

    Each warp multiplies its own with ones, in registers, without a warpgroup's product.
    """
    ones = gl.full([BLOCK, SUMS], 1.0, rounded.dtype, gl.DotOperandLayout(1, TOTAL, 2))
    left = gl.convert_layout(rounded, gl.DotOperandLayout(0, TOTAL, 2))
    return hopper.mma_v2(left, ones, total)


@gluon.jit
def add_values(rounded, tile, acc, ACC: gl.constexpr):
    """Start to add a block's weighted values to the sums.

    Returns these, and the weights, whose registers are read until the warpgroup has waited.
    """
    left = gl.convert_layout(rounded, gl.DotOperandLayout(0, ACC, 2))
    return hopper.warpgroup_mma(left, tile, acc, is_async=True), left


@gluon.jit
def outputs_of(
    best, total, acc, sinks_ptr, head, is_row, v_scale, ACC: gl.constexpr, HAS_SINKS: gl.constexpr
):  # fmt: skip
    """The outputs of rows whose tokens are all summed."""
    if HAS_SINKS:
        sink = gl.load(sinks_ptr + head, mask=is_row, other=0.0).to(gl.float32) * LOG2_E
        one = gl.full(total.shape, 1.0, gl.float32, gl.SliceLayout(1, ACC))
        no_value = gl.zeros(acc.shape, gl.float32, ACC)
        best, total, acc = add(best, total, acc, sink, one, no_value)
    acc *= v_scale
    return acc / gl.where(total > 0, total, 1.0)[:, None]

"""Keys and values of attention, block by block, in the shared memory of a Hopper GPU.

Some warps of a program load them, and warpgroups compute with them meanwhile: in `prompt_attention`
and `few_rows_attention`.
"""

from torch import Tensor

from ..dependent_launch import wait_for_inputs
from ..triton_or_none import gl, gluon, hopper
from .attention_items import WIDTH, split_of, start_of
from .fp8 import from_e4m3
from .softmax_sums import LOG2_E, add

mbarrier, tma = hopper.mbarrier, hopper.tma

SUMS = gl.constexpr(8)  # columns of a product with ones: the fewest that tensor cores can do
AHEAD = gl.constexpr(2)  # blocks in FP8 that are on their way


def block_of(k_cache: Tensor) -> int:
    """How many tokens a layer's blocks have. Whatever computes a row takes the same."""
    return 128 if k_cache.shape[3] == 128 and k_cache.element_size() == 2 else 64


@gluon.jit
def item_of(turn):
    """The item of a program's turn: they come longest first, so every other round goes back."""
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return turn * gl.num_programs(0) + place


@gluon.jit
def tokens_of(item_ptr, window, BLOCK: gl.constexpr, HAS_WINDOW: gl.constexpr):
    """The first and last token that any row of an item sees, and the start of the first block."""
    first_position = gl.load(item_ptr + 2)
    begin = 0
    if HAS_WINDOW:
        begin = gl.maximum(first_position - window + 1, 0)
    return begin, first_position + gl.load(item_ptr + 1), begin // BLOCK * BLOCK


@gluon.jit
def copy_block(
    cache, parts, barrier, stage, pages_ptr, start, end, column,
    BLOCK: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
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
    BLOCK: gl.constexpr = tiles[0].shape[1]
    items_ptr, num_items, window = work
    block = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < num_items:
            column = item % NUM_KV_HEADS * DIM
            item_ptr = items_ptr + item // NUM_KV_HEADS * WIDTH
            pages_ptr = block_table_ptr + gl.load(item_ptr + 3).to(gl.int64) * block_table_stride
            _, end, first = tokens_of(item_ptr, window, BLOCK, HAS_WINDOW)
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
                                pages_ptr, first + i * BLOCK, end, column, BLOCK, DIM, PAGE,
                            )  # fmt: skip
            else:
                for i in range(num_blocks):
                    stage, phase = (block + i) % STAGES, (block + i) // STAGES & 1
                    for which in gl.static_range(2):
                        mbarrier.wait(free[which].index(stage), phase ^ 1)
                        copy_block(
                            caches[which], parts[which], has[which].index(stage), stage,
                            pages_ptr, first + i * BLOCK, end, column, BLOCK, DIM, PAGE,
                        )  # fmt: skip
            block += num_blocks


@gluon.jit
def weights_of(
    logits, start, position, first_position, last_position, best, factor, window,
    LOGITS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A block's weights, the new maximum, and what the sums so far are to be multiplied with."""
    BLOCK: gl.constexpr = logits.shape[1]
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
    BLOCK: gl.constexpr = tile.shape[0]
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
    ones = gl.full([rounded.shape[1], SUMS], 1.0, rounded.dtype, gl.DotOperandLayout(1, TOTAL, 2))
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
def tiles_of(
    dtype: gl.constexpr, BLOCK: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory of keys, then of values: in parts, as they are copied, and as tiles."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PART: gl.constexpr = min(PAGE, BLOCK)
    NUM: gl.constexpr = STAGES * (DIM // 64) * (BLOCK // PART)
    k_parts = gl.allocate_shared_memory(dtype, [NUM, PART, 64], TILE)
    v_parts = gl.allocate_shared_memory(dtype, [NUM, PART, 64], TILE)
    tiles = (
        k_parts._reinterpret(dtype, [STAGES, BLOCK, DIM], TILE),
        v_parts._reinterpret(dtype, [STAGES, BLOCK, DIM], TILE),
    )
    return (k_parts, v_parts), tiles


@gluon.jit
def load_queries(
    query_tile, query_ptr, query_strides, first_row, num_rows, first_head, m, GROUP: gl.constexpr,
    DIM: gl.constexpr, LOADED: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """The rows m of an item, of which each of GROUP heads is one, into shared memory; with WAITS
    they are not there yet.
    """
    stride_t, stride_h = query_strides
    row = (first_row + m // GROUP).to(gl.int64) * stride_t
    at = row + (first_head + m % GROUP).to(gl.int64) * stride_h
    d = gl.arange(0, DIM, gl.SliceLayout(0, LOADED))[None, :]
    is_row = m < num_rows * GROUP
    wait_for_inputs(WAITS)
    query_tile.store(gl.load(query_ptr + at[:, None] + d, mask=is_row[:, None], other=0.0))
    hopper.fence_async_shared()


@gluon.jit
def sums_of_tokens(
    block, query_tile, tiles, has, free, past_sums, tokens, position, positions, unit, factor,
    window, DTYPE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, IN_SPLITS: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    """What rows see of an item's tokens: maximum, total and sum of the splits before the last if
    IN_SPLITS, else of nothing; then those of the last; and the block behind it. One warpgroup.

    The keys of a block are free by themselves if IN_SPLITS, else together with its values. Sums of
    past splits are kept in `past_sums`, shared memory, or in registers if that is None.
    """
    ROWS: gl.constexpr = query_tile.shape[0]
    BLOCK: gl.constexpr = tiles[0].shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, SUMS])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    k_tiles, v_tiles = tiles
    has_keys, has_values = has
    keys_free, values_free = free
    begin, end, first = tokens
    first_position, last_position = positions
    no_logits = gl.zeros([ROWS, BLOCK], gl.float32, LOGITS)
    best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([ROWS, SUMS], gl.float32, TOTAL)
    acc = gl.zeros([ROWS, DIM], gl.float32, ACC)
    past_best = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    past_total = gl.zeros([ROWS], gl.float32, ROW)
    past_acc = gl.zeros([ROWS, DIM], gl.float32, ACC)
    if past_sums is not None:
        past_sums.store(past_acc)
    if IN_SPLITS:
        next_split = start_of(split_of(begin, unit) + 1, unit)

    stage, phase = block % STAGES, block // STAGES & 1
    mbarrier.wait(has_keys.index(stage), phase)
    keys = k_tiles.index(stage).permute((1, 0))
    logits = hopper.warpgroup_mma(query_tile, keys, no_logits, use_acc=False)
    if IN_SPLITS:
        mbarrier.arrive(keys_free.index(stage), count=1)
    weights, best, decay = weights_of(
        logits, first, position, first_position, last_position, best, factor, window, LOGITS,
        HAS_WINDOW,
    )  # fmt: skip
    rounded = weights.to(DTYPE)
    for start in range(first + BLOCK, end, BLOCK):
        # Logits of this block, while the one before is added to the sums.
        last_stage, last_phase = stage, phase
        block += 1
        stage, phase = block % STAGES, block // STAGES & 1
        total = add_weights(rounded, total, TOTAL)
        mbarrier.wait(has_keys.index(stage), phase)
        keys = k_tiles.index(stage).permute((1, 0))
        logits = hopper.warpgroup_mma(query_tile, keys, no_logits, use_acc=False, is_async=True)
        mbarrier.wait(has_values.index(last_stage), last_phase)
        if HAS_WINDOW:
            without_strangers(v_tiles.index(last_stage), start - BLOCK, begin, end, LOADED)
        acc, left = add_values(rounded, v_tiles.index(last_stage), acc, ACC)
        logits = hopper.warpgroup_mma_wait(1, deps=[logits])
        best_before = best
        if IN_SPLITS:
            mbarrier.arrive(keys_free.index(stage), count=1)
            is_new = start >= next_split
            best_before = gl.where(is_new, float("-inf"), best)
        weights, new_best, decay = weights_of(
            logits, start, position, first_position, last_position, best_before, factor, window,
            LOGITS, HAS_WINDOW,
        )  # fmt: skip
        rounded = weights.to(DTYPE)
        # A branch, whose outcome is known: else the assembler would move the making of the weights
        # behind the wait for the sums.
        mbarrier.wait(has_values.index(last_stage), last_phase)
        acc, left, rounded = hopper.warpgroup_mma_wait(0, deps=[acc, left, rounded])
        mbarrier.arrive(values_free.index(last_stage), count=1)
        if IN_SPLITS:  # noqa: SIM102 the first is a constant
            if is_new:
                past = past_acc if past_sums is None else past_sums.load(ACC)
                past_best, past_total, past = add(
                    past_best, past_total, past, gl.convert_layout(best, ROW),
                    gl.convert_layout(gl.max(total, 1), ROW), acc,
                )  # fmt: skip
                if past_sums is None:
                    past_acc = past
                else:
                    past_sums.store(past)
                next_split = start_of(split_of(start, unit) + 1, unit)
        best = new_best  # where a split is new, `decay` is 0
        acc *= gl.convert_layout(decay, ROW)[:, None]
        total *= gl.convert_layout(decay, gl.SliceLayout(1, TOTAL))[:, None]
    mbarrier.wait(has_values.index(stage), phase)
    last = (end - 1) // BLOCK * BLOCK
    if not IN_SPLITS:  # there may be no tokens
        last = gl.maximum(first, last)
    without_strangers(v_tiles.index(stage), last, begin, end, LOADED)
    total = add_weights(rounded, total, TOTAL)
    acc, left = add_values(rounded, v_tiles.index(stage), acc, ACC)
    acc, left = hopper.warpgroup_mma_wait(0, deps=[acc, left])
    mbarrier.arrive(values_free.index(stage), count=1)
    best, total = gl.convert_layout(best, ROW), gl.convert_layout(gl.max(total, 1), ROW)
    if past_sums is not None:
        past_acc = past_sums.load(ACC)
    return past_best, past_total, past_acc, best, total, acc, block + 1


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

"""Lists the pairs of rows and experts by expert, in tiles of a fixed size.

A pair is a row and one of its experts: pair = row * k + choice. Pairs of the same expert are put
into tiles, in the order of their rows, so that a product reads an expert's weights once for a whole
tile. How many tiles there are is known on the device only; the host knows a bound.

Rows are taken in blocks. Each block counts its pairs of every expert. From all counts each block
knows where its pairs begin, and lists them. A single block needs no counts of others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton

_TILES = (16, 32, 64, 128)  # rows of a tile
AT_ONCE = 8192  # pairs of rows and experts, chosen or not, that one program holds


class ExpertTiles(NamedTuple):
    """Pairs by expert. What lies behind the last tile has the expert E and pairs of T * k."""

    experts: Tensor  # [tiles] int32
    pairs: Tensor  # [tiles, size] int32; T * k where a tile has no more


def empty_tiles(num_rows: int, top_k: int, num_experts: int, device: torch.device) -> ExpertTiles:
    num_pairs = num_rows * top_k
    # Twice the rows that an expert gets on average. No sum depends on it.
    size = next((size for size in _TILES if 2 * num_pairs <= size * num_experts), _TILES[-1])
    # Each expert fills tiles, but for its last one.
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (size - 1)) // size
    return ExpertTiles(
        torch.empty(num_tiles, dtype=torch.int32, device=device),
        torch.empty(num_tiles, size, dtype=torch.int32, device=device),
    )


def tiles_of(ids: Tensor, num_experts: int) -> ExpertTiles:
    """Pairs by expert; rows of -1 have none. Shape: ids [T, k] int32."""
    if not uses_triton(ids):
        return tiles_reference(ids, num_experts)
    assert ids.is_contiguous()
    num_rows, top_k = ids.shape
    tiles = empty_tiles(num_rows, top_k, num_experts, ids.device)
    padded = triton.next_power_of_2(num_experts)
    rows = max(1, AT_ONCE // padded)
    num_blocks = triton.cdiv(num_rows, rows)
    counts = ids.new_empty(num_blocks, padded)
    options = {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "EXPERTS": padded, "ROWS": rows}
    launch = {"num_warps": 8, **dependent_launch(ids.device)}
    _count_kernel[(num_blocks,)](counts, ids, num_rows, **options, **launch)
    _list_kernel[(num_blocks,)](
        *tiles, counts, ids, num_rows, num_blocks, len(tiles.experts),
        SIZE=tiles.pairs.shape[1], **options, **launch,
    )  # fmt: skip
    return tiles


def tiles_reference(ids: Tensor, num_experts: int) -> ExpertTiles:
    num_rows, top_k = ids.shape
    tiles = empty_tiles(num_rows, top_k, num_experts, ids.device)
    size = tiles.pairs.shape[1]
    tiles.experts.fill_(num_experts)
    tiles.pairs.fill_(ids.numel())
    tile = 0
    for expert in range(num_experts):
        pairs = (ids.flatten() == expert).nonzero()[:, 0]
        for part in pairs.split(size):
            if len(part):
                tiles.experts[tile] = expert
                tiles.pairs[tile, : len(part)] = part
                tile += 1
    return tiles


@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(
    counts_ptr,  # [blocks, EXPERTS]
    ids_ptr,  # [num_rows, TOP_K]
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: the pairs of ROWS rows."""
    start_next_kernel(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    choice = _choices(ids_ptr, num_rows, TOP_K, EXPERTS, ROWS)
    e = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + e, tl.sum((choice >= 0).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_tiles"])
def _list_kernel(
    experts_ptr,  # [num_tiles]
    pairs_ptr,  # [num_tiles, SIZE]
    counts_ptr,  # [num_blocks, EXPERTS]
    ids_ptr,  # [num_rows, TOP_K]
    num_rows,
    num_blocks,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: the pairs of ROWS rows, and its share of what is not a pair."""
    start_next_kernel(DEPENDENT)
    block, e = tl.program_id(0), tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    count = tl.zeros([EXPERTS], tl.int32)
    wait_for_inputs(DEPENDENT)
    choice = _choices(ids_ptr, num_rows, TOP_K, EXPERTS, ROWS)
    for other in range(num_blocks):
        theirs = tl.load(counts_ptr + other * EXPERTS + e, cache_modifier=".cg")
        before += tl.where(other < block, theirs, 0)
        count += theirs
    list_pairs(
        experts_ptr, pairs_ptr, choice, before, count, num_rows, block, num_blocks, num_tiles,
        NUM_EXPERTS, TOP_K, EXPERTS, ROWS, SIZE,
    )  # fmt: skip


@triton.jit
def _choices(
    ids_ptr, num_rows, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Which of a row's choices each expert is, or -1. Shape: [ROWS, EXPERTS]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    choice = tl.full([ROWS, EXPERTS], -1, tl.int32)
    for c in tl.static_range(TOP_K):
        at = ids_ptr + row * TOP_K + c
        expert = tl.load(at, mask=row < num_rows, other=-1, cache_modifier=".cg")
        choice = tl.where(e[None, :] == expert[:, None], c, choice)
    return choice


@triton.jit
def list_pairs(
    experts_ptr, pairs_ptr, choice, before, count, num_rows, block, num_blocks, num_tiles,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the pairs of one of the blocks into their tiles, and its share of the other places.

    Shape: choice [ROWS, EXPERTS]; before, the pairs of earlier blocks, and count, those of all:
    [EXPERTS].
    """
    e = tl.arange(0, EXPERTS)
    row = block * ROWS + tl.arange(0, ROWS)
    end = tl.cumsum((count + SIZE - 1) // SIZE, 0)
    first = end - (count + SIZE - 1) // SIZE
    is_chosen = choice >= 0
    place = (first * SIZE + before)[None, :] + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(pairs_ptr + place, row[:, None] * TOP_K + choice, mask=is_chosen)
    # Tiles at once: as many as rows, unless they have more places.
    MOST: tl.constexpr = EXPERTS * ROWS // SIZE
    TILES: tl.constexpr = ROWS if MOST >= ROWS else (MOST if MOST > 0 else 1)
    for start in range(block * TILES, num_tiles, num_blocks * TILES):
        tile = start + tl.arange(0, TILES)
        # Experts whose last tile is before this one come before its expert.
        expert = tl.minimum(tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1), NUM_EXPERTS)
        tl.store(experts_ptr + tile, expert, mask=tile < num_tiles)
        is_its = e[None, :] == expert[:, None]
        left = count[None, :] - (tile[:, None] - first[None, :]) * SIZE
        num_pairs = tl.sum(tl.where(is_its & (e < NUM_EXPERTS)[None, :], left, 0), 1)
        i = tl.arange(0, SIZE)
        nothing = tl.zeros([TILES, SIZE], tl.int32) + num_rows * TOP_K
        is_free = (i[None, :] >= num_pairs[:, None]) & (tile < num_tiles)[:, None]
        tl.store(pairs_ptr + tile[:, None] * SIZE + i[None, :], nothing, mask=is_free)

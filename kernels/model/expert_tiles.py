"""Lists the pairs of rows and experts by expert, in tiles of a fixed size.

A pair is a row and one of its experts: pair = row * k + choice. Pairs of the same expert are put
into tiles, in the order of their rows, so that a product reads an expert's weights once for a whole
tile. How many tiles there are is known on the device only; the host knows a bound.

Ids are taken in slices. From the counts of every slice, each expert's programs know where its pairs
begin; each of them finds and lists the pairs of one slice. With one slice, each counts for itself.
Few rows the router's kernel lists itself (`clear_tiles`, `places_in_tiles`), which saves a launch.
Shared experts, which every row has, need no search: their tiles come last.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton

_TILES = (16, 32, 64, 128)  # rows of a tile
# Those of one expert fit into one tile of any size. With more, one program is slower than many.
FEW_ROWS = 8
_SLICE = 4096  # ids that one program reads
_WARPS = 4  # of such a program


class ExpertTiles(NamedTuple):
    """Pairs by expert. What lies behind the last tile has no expert, and pairs of T * k."""

    experts: Tensor  # [tiles] int32; none: as many as there are
    pairs: Tensor  # [tiles, size] int32; T * k where a tile has no more


def empty_tiles(
    num_rows: int, top_k: int, num_experts: int, num_shared: int, device: torch.device
) -> ExpertTiles:
    """A row chooses `top_k` of `num_experts`."""
    num_pairs = num_rows * top_k
    # Twice the rows that an expert gets on average. No sum depends on it.
    size = next((size for size in _TILES if 2 * num_pairs <= size * num_experts), _TILES[-1])
    # Each expert fills tiles, but for its last one.
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (size - 1)) // size
    num_tiles += num_shared * -(-num_rows // size)
    return ExpertTiles(
        torch.empty(num_tiles, dtype=torch.int32, device=device),
        torch.empty(num_tiles, size, dtype=torch.int32, device=device),
    )


def tiles_of(ids: Tensor, num_experts: int, num_shared: int = 0) -> ExpertTiles:
    """Pairs by expert; rows of -1, behind all others, have none.

    Shape: ids [T, k] int32, the last `num_shared` of a row those of the experts from `num_experts`
    on.
    """
    if not uses_triton(ids):
        return tiles_reference(ids, num_experts, num_shared)
    assert ids.is_contiguous()
    num_rows, top_k = len(ids), ids.shape[1] - num_shared
    tiles = empty_tiles(num_rows, top_k, num_experts, num_shared, ids.device)
    num_ids = num_rows * top_k
    # Of each thread of a program at least one.
    slice_size = min(max(512, triton.next_power_of_2(num_ids)), _SLICE)
    num_slices = triton.cdiv(num_ids, slice_size)
    experts = max(32, triton.next_power_of_2(num_experts))
    options = {"TOP_K": top_k, "NUM_SHARED": num_shared}
    options |= {"EXPERTS": experts, "IDS": slice_size, "num_warps": _WARPS}
    options |= dependent_launch(ids.device)
    counts = None
    if num_slices > 1:
        counts = ids.new_empty(num_slices, experts)
        _count_kernel[(num_slices,)](counts, ids, num_ids, **options)
    _list_kernel[(num_experts + num_shared, num_slices)](
        *tiles, counts, ids, num_ids, num_slices, len(tiles.experts), num_experts,
        SIZE=tiles.pairs.shape[1], **options,
    )  # fmt: skip
    return tiles


def tiles_reference(ids: Tensor, num_experts: int, num_shared: int = 0) -> ExpertTiles:
    num_rows, top_k, num_all = len(ids), ids.shape[1] - num_shared, num_experts + num_shared
    tiles = empty_tiles(num_rows, top_k, num_experts, num_shared, ids.device)
    size = tiles.pairs.shape[1]
    tiles.experts.fill_(num_all)
    tiles.pairs.fill_(ids.numel())
    tile = 0
    for expert in range(num_all):
        pairs = (ids.flatten() == expert).nonzero()[:, 0]
        for part in pairs.split(size):
            if len(part):
                tiles.experts[tile] = expert
                tiles.pairs[tile, : len(part)] = part
                tile += 1
    return tiles


@triton.jit(do_not_specialize=["num_ids"])
def _count_kernel(
    counts_ptr,  # [slices, EXPERTS]
    ids_ptr,  # [rows, TOP_K + NUM_SHARED]
    num_ids,  # of experts that are not shared
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    IDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: a slice of IDS ids."""
    start_next_kernel(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    ids, _ = _ids_of_slice(ids_ptr, num_ids, tl.program_id(0), TOP_K, NUM_SHARED, IDS)
    count = tl.histogram(ids, EXPERTS, mask=ids >= 0)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), count)


@triton.jit(do_not_specialize=["num_ids", "num_slices", "num_tiles"])
def _list_kernel(
    experts_ptr,  # [num_tiles]
    pairs_ptr,  # [num_tiles, SIZE]
    counts_ptr,  # [num_slices, EXPERTS], or None of a single slice
    ids_ptr,  # [rows, TOP_K + NUM_SHARED]
    num_ids,  # of experts that are not shared
    num_slices,
    num_tiles,
    num_experts,  # that are not shared
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    IDS: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: the pairs of one expert in a slice of IDS ids or, of a shared expert, some of
    its tiles; and its share of what is not a pair.
    """
    TAKEN: tl.constexpr = TOP_K + NUM_SHARED
    start_next_kernel(DEPENDENT)
    expert, here, e = tl.program_id(0), tl.program_id(1), tl.arange(0, EXPERTS)
    wait_for_inputs(DEPENDENT)
    ids, pairs = _ids_of_slice(ids_ptr, num_ids, here, TOP_K, NUM_SHARED, IDS)
    before = 0  # pairs of this expert in earlier slices
    if counts_ptr is None:
        count = tl.histogram(ids, EXPERTS, mask=ids >= 0)
    else:
        count = tl.zeros([EXPERTS], tl.int32)
        SLICES: tl.constexpr = 4096 // EXPERTS  # whose counts are read at once
        for start in range(0, num_slices, SLICES):
            other = start + tl.arange(0, SLICES)[:, None]
            at = counts_ptr + other * EXPERTS + e[None, :]
            theirs = tl.load(at, mask=other < num_slices, other=0, cache_modifier=".cg")
            count += tl.sum(theirs, 0)
            is_before = (other < here) & (e == expert)[None, :]
            before += tl.sum(tl.where(is_before, theirs, 0))
    tiles = (count + SIZE - 1) // SIZE
    own, first = tl.where(e == expert, count, 0), tl.where(e < expert, tiles, 0)
    own, first, num_filled, num_taken = tl.reduce((own, first, tiles, count), 0, _add_each)
    i = tl.arange(0, SIZE)
    nothing = tl.zeros([SIZE], tl.int32) + num_ids // TOP_K * TAKEN
    if expert < num_experts:
        end = first + (own + SIZE - 1) // SIZE
        is_its = ids == expert
        place = first * SIZE + before + tl.cumsum(is_its.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + place, pairs, mask=is_its)
        if here == 0:
            for tile in range(first, end):
                tl.store(experts_ptr + tile, expert)
            behind = first * SIZE + own
            rest = (end - 1) * SIZE + i  # of its last tile, if it has one
            tl.store(pairs_ptr + rest, nothing, mask=(rest >= behind) & (end > first))
    if NUM_SHARED > 0:
        num_rows = num_taken // TOP_K
        num_each, which = (num_rows + SIZE - 1) // SIZE, expert - num_experts
        if which >= 0:
            for tile in range(here, num_each, num_slices):
                row, at = tile * SIZE + i, num_filled + which * num_each + tile
                pair = tl.where(row < num_rows, row * TAKEN + TOP_K + which, nothing)
                tl.store(experts_ptr + at, expert)
                tl.store(pairs_ptr + at * SIZE + i, pair)
        num_filled += NUM_SHARED * num_each
    num_all = num_experts + NUM_SHARED
    for tile in range(num_filled + here * num_all + expert, num_tiles, num_all * num_slices):
        tl.store(experts_ptr + tile, num_all)
        tl.store(pairs_ptr + tile * SIZE + i, nothing)


@triton.jit
def _add_each(a, b, c, d, other_a, other_b, other_c, other_d):
    return a + other_a, b + other_b, c + other_c, d + other_d


@triton.jit
def _ids_of_slice(
    ids_ptr, num_ids, here, TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr, IDS: tl.constexpr
):
    """Experts that are not shared, -1 behind the last, and their pairs. Shape: [IDS] each."""
    i = here * IDS + tl.arange(0, IDS)
    pair = i + i // TOP_K * NUM_SHARED
    return tl.load(ids_ptr + pair, mask=i < num_ids, other=-1, cache_modifier=".cg"), pair


@triton.jit
def clear_tiles(experts_ptr, pairs_ptr, num_tiles, num_experts, num_pairs, SIZE: tl.constexpr):
    """Write no expert and no pairs into all tiles."""
    for first in range(0, num_tiles, 128):
        tile, i = first + tl.arange(0, 128)[:, None], tl.arange(0, SIZE)[None, :]
        nothing = tl.zeros([128, SIZE], tl.int32) + num_pairs
        tl.store(experts_ptr + tile, num_experts, mask=tile < num_tiles)
        tl.store(pairs_ptr + tile * SIZE + i, nothing, mask=tile < num_tiles)


@triton.jit
def places_in_tiles(
    is_chosen, ids, NUM_EXPERTS: tl.constexpr, NUM_SHARED: tl.constexpr, SIZE: tl.constexpr
):
    """Where the pairs of at most FEW_ROWS rows are in tiles, of which each expert fills one.

    Shape: is_chosen [rows, EXPERTS], ids, the shared experts last, [rows, CHOICES] -> as ids
    """
    chosen = is_chosen.to(tl.int32)
    filled = (tl.sum(chosen, 0) > 0).to(tl.int32)[None, :] + tl.zeros_like(chosen)
    place = (tl.cumsum(filled, 1) - filled) * SIZE + tl.cumsum(chosen, 0) - chosen
    at = tl.gather(place, tl.minimum(ids, NUM_EXPERTS - 1), 1)
    if NUM_SHARED > 0:
        row, num_filled = tl.arange(0, ids.shape[0])[:, None], tl.sum(filled, 1)[:, None]
        of_shared = (num_filled + ids - NUM_EXPERTS) * SIZE + row
        at = tl.where(ids < NUM_EXPERTS, at, of_shared)
    return at

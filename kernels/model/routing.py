"""Routes rows to experts: each row's best experts and their weights, then the rows by expert.

    weights = softmax of the k largest logits, or their shares of a softmax over all logits

A pair is a row and one of its experts: pair = row * k + choice. Pairs of the same expert are put
into tiles of a fixed size, in the order of their rows, so that a product reads an expert's weights
once for a whole tile. How many tiles there are is known on the device only; the host knows a bound.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton

_TILES = (16, 32, 64, 128)  # rows of a tile
_AT_ONCE = 8192  # logits that one program holds
_FLOOR = -3.0e38  # stands for logits of -inf and NaN, so that choices stay distinct
_LEAST = tl.constexpr(_FLOOR)


class Tiles(NamedTuple):
    """Pairs by expert. What lies behind the last tile has the expert E and pairs of T * k."""

    experts: Tensor  # [tiles] int32
    pairs: Tensor  # [tiles, size] int32; T * k where a tile has no more


class Routing(NamedTuple):
    """The experts of each row, the best first."""

    ids: Tensor  # [T, k] int32, distinct in a row
    weights: Tensor  # [T, k] float32
    tiles: Tiles


def route(logits: Tensor, top_k: int, *, over_all: bool = False) -> Routing:
    """Choose each row's `top_k` largest logits; the first of equal ones.

    Weights are a softmax over these, or with `over_all` over all logits. A row's choice does not
    depend on the other rows. Shape: [T, E], rows dense.
    """
    num_rows, num_experts = logits.shape
    assert 0 < top_k <= num_experts
    if not uses_triton(logits):
        return routing_of(*choose_reference(logits, top_k, over_all=over_all), num_experts)
    ids = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    padded = triton.next_power_of_2(num_experts)
    block = max(1, _AT_ONCE // padded)
    tiles = None
    if num_rows <= block:
        block = triton.next_power_of_2(num_rows)
        tiles = _empty_tiles(num_rows, top_k, num_experts, logits.device)
    _route_kernel[(triton.cdiv(num_rows, block),)](
        ids,
        weights,
        tiles.experts if tiles else None,
        tiles.pairs if tiles else None,
        logits,
        num_rows,
        logits.stride(0),
        len(tiles.experts) if tiles else 0,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        OVER_ALL=over_all,
        EXPERTS=padded,
        ROWS=block,
        SIZE=tiles.pairs.shape[1] if tiles else 1,
        num_warps=max(1, min(8, block * padded // 256)),
        **dependent_launch(logits.device),
    )
    return Routing(ids, weights, tiles) if tiles else routing_of(ids, weights, num_experts)


def choose_reference(
    logits: Tensor, top_k: int, *, over_all: bool = False
) -> tuple[Tensor, Tensor]:
    """Ids and weights of each row's experts. Shape: [T, E] -> [T, k] int32, [T, k] float32."""
    sane = logits.float().nan_to_num(_FLOOR, posinf=torch.inf, neginf=_FLOOR)
    order = sane.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    if over_all:
        return order.int(), sane.softmax(1).gather(1, order)
    return order.int(), sane.gather(1, order).softmax(1)


def routing_of(ids: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """A routing whose experts are chosen already. Shape: [T, k] each."""
    return Routing(ids, weights, tiles_of(ids, num_experts))


def tiles_of(ids: Tensor, num_experts: int) -> Tiles:
    """Pairs by expert, without waiting for the device. Shape: ids [T, k] int32."""
    num_rows, top_k = ids.shape
    tiles = _empty_tiles(num_rows, top_k, num_experts, ids.device)
    size = tiles.pairs.shape[1]
    experts, pairs = ids.flatten().sort(stable=True)
    every = torch.arange(num_experts + 1, dtype=experts.dtype, device=ids.device)
    first_pair = torch.searchsorted(experts, every)  # [E + 1]
    num_tiles = (first_pair.diff() + size - 1) // size
    end = num_tiles.cumsum(0)
    place = (end - num_tiles)[experts.long()] * size - first_pair[experts.long()]
    place += torch.arange(len(pairs), device=ids.device)
    tiles.pairs.fill_(len(pairs))
    tiles.pairs.view(-1)[place] = pairs.int()
    numbers = torch.arange(len(tiles.experts), device=ids.device)
    tiles.experts.copy_(torch.searchsorted(end, numbers, right=True))
    return tiles


def _empty_tiles(num_rows: int, top_k: int, num_experts: int, device: torch.device) -> Tiles:
    num_pairs = num_rows * top_k
    # Twice the rows that an expert gets on average. No sum depends on it.
    size = next((size for size in _TILES if 2 * num_pairs <= size * num_experts), _TILES[-1])
    # Each expert fills tiles, but for its last one.
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (size - 1)) // size
    return Tiles(
        torch.empty(num_tiles, dtype=torch.int32, device=device),
        torch.empty(num_tiles, size, dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _route_kernel(
    ids_ptr,  # [num_rows, TOP_K]
    weights_ptr,  # [num_rows, TOP_K]
    experts_ptr,  # [num_tiles], or None
    pairs_ptr,  # [num_tiles, SIZE], or None
    logits_ptr,  # [num_rows, NUM_EXPERTS]
    num_rows,
    logits_stride,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OVER_ALL: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: ROWS rows. With tiles there is one program, which lists them as well."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    is_row = row < num_rows
    given = is_row[:, None] & (e < NUM_EXPERTS)[None, :]
    wait_for_inputs(DEPENDENT)
    at = logits_ptr + row.to(tl.int64)[:, None] * logits_stride + e[None, :]
    logits = tl.load(at, mask=given, other=0.0).to(tl.float32)
    logits = tl.where(logits > _LEAST, logits, _LEAST)  # also what is not a number
    logits = tl.where((e < NUM_EXPERTS)[None, :], logits, float("-inf"))

    best, left = tl.max(logits, 1), logits
    choice = tl.full([ROWS, EXPERTS], -1, tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    for c in tl.static_range(TOP_K):
        top = tl.max(left, 1)
        chosen = tl.min(tl.where(left == top[:, None], e[None, :], EXPERTS), 1)
        is_now = e[None, :] == chosen[:, None]
        choice = tl.where(is_now, c, choice)
        left = tl.where(is_now, float("-inf"), left)
        total += tl.exp(top - best)
    if OVER_ALL:
        total = tl.sum(tl.exp(logits - best[:, None]), 1)
    is_chosen = (choice >= 0) & is_row[:, None]
    pair = row[:, None] * TOP_K + choice
    tl.store(ids_ptr + pair, tl.zeros_like(choice) + e[None, :], mask=is_chosen)
    tl.store(weights_ptr + pair, tl.exp(logits - best[:, None]) / total[:, None], mask=is_chosen)

    if experts_ptr is not None:
        ones = is_chosen.to(tl.int32)
        count = tl.sum(ones, 0)
        tiles = (count + SIZE - 1) // SIZE
        first = tl.cumsum(tiles, 0) - tiles
        place = first[None, :] * SIZE + tl.cumsum(ones, 0) - 1
        tl.store(pairs_ptr + place, pair, mask=is_chosen)
        # The rest of each expert's last tile, and the tiles behind the last.
        free = count[:, None] + tl.arange(0, SIZE)[None, :]
        nothing = tl.zeros([EXPERTS, SIZE], tl.int32) + num_rows * TOP_K
        in_tile = free < (tiles * SIZE)[:, None]
        tl.store(pairs_ptr + first[:, None] * SIZE + free, nothing, mask=in_tile)
        MOST: tl.constexpr = (ROWS + SIZE - 1) // SIZE  # tiles of an expert: a power of two
        tile = tl.arange(0, MOST)
        of_expert = tl.zeros([EXPERTS, MOST], tl.int32) + e[:, None]
        is_tile = tile[None, :] < tiles[:, None]
        tl.store(experts_ptr + first[:, None] + tile[None, :], of_expert, mask=is_tile)
        num_used = tl.sum(tiles, 0)
        for start in range(num_used, num_tiles, EXPERTS):
            behind = start + e
            tl.store(experts_ptr + behind, NUM_EXPERTS + 0 * e, mask=behind < num_tiles)
            places = behind[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
            tl.store(pairs_ptr + places, nothing, mask=(behind < num_tiles)[:, None])

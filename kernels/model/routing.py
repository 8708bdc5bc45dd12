"""Routes rows to experts: each row's best experts and their weights, then the rows by expert.

    softmax: the k largest logits;  weights = scale * softmax of these, or shares of one over all
    sigmoid: the k largest s + bias, s = sigmoid(logits), of the best groups of experts;
             weights = scale * s / sum of the chosen s, or scale * s

A group is as good as the sum of its two largest s + bias.

Shared experts follow those that are chosen: every row takes them, with weight 1 or the sigmoid of a
further logit, their gate. Padding rows, behind all others, have no experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .expert_tiles import FEW_ROWS, ExpertTiles, clear_tiles, empty_tiles, places_in_tiles, tiles_of
from .sigmoid_gate import sigmoid_reference

_WARPS = 4  # of a program at least, each with a row
_FLOOR = -3.0e38  # stands for logits of -inf and NaN, so that choices stay distinct
_LEAST = tl.constexpr(_FLOOR)
_TINY = tl.constexpr(1e-20)  # is added to a sum of sigmoids, as transformers does
_CHOSEN = tl.constexpr(-(2**31))  # less than the key of any number
_ONE = tl.constexpr(2.0**40)  # in sums of shares, which are integers: so they have one value


class Router(NamedTuple):
    """How a row chooses experts by its logits."""

    top_k: int
    over_all: bool = False  # whether weights are shares among all experts, not the chosen
    scale: float = 1.0  # of all weights
    sigmoid: bool = False  # else softmax, without bias and groups
    bias: Tensor | None = None  # [E] float32; for the choice alone
    num_groups: int = 1  # of neighbours, alike in size
    top_groups: int = 1  # from which a row chooses
    num_shared: int = 0  # further experts, which every row takes
    gate: int | None = None  # the logit, the next behind those of E experts, that is theirs

    def num_experts_of(self, logits: Tensor) -> int:
        """Of how many experts a row chooses. Shape: [T, E] or, with a gate, [T, E + 1 or more]."""
        return logits.shape[1] if self.gate is None else self.gate

    def why_impossible(self, num_experts: int) -> str | None:
        """Why no row can choose so; None if rows can."""
        in_group = num_experts // max(1, self.num_groups)
        are_even = self.num_groups > 0 and num_experts % self.num_groups == 0
        if not are_even or (self.num_groups > 1 and in_group < 2):
            return f"{num_experts} experts do not form {self.num_groups} groups"
        if not 0 < self.top_groups <= self.num_groups:
            return f"a row chooses {self.top_groups} of {self.num_groups} groups of experts"
        if not 0 < self.top_k <= in_group * self.top_groups:
            return f"a row takes {self.top_k} of {in_group * self.top_groups} experts"
        return None


class Routing(NamedTuple):
    """The experts of each row, the best first, and the shared ones last: k in all."""

    ids: Tensor  # [T, k] int32, distinct in a row; -1: padding
    weights: Tensor  # [T, k] float32
    tiles: ExpertTiles
    num_rows: Tensor | None = None  # [1] rows that are no padding; None: all


def route(logits: Tensor, router: Router, rows: Tensor | None = None) -> Routing:
    """Choose each row's experts; the first of equal ones.

    A row's choice and the bits of its weights do not depend on the other rows. Shape: [T, E] or,
    with a gate, [T, E + 1 or more], rows dense; `rows` [1], how many are no padding (None: all).
    """
    num_rows, num_experts = len(logits), router.num_experts_of(logits)
    num_taken = router.top_k + router.num_shared
    assert router.why_impossible(num_experts) is None
    assert router.sigmoid or (router.bias is None and router.num_groups == 1)
    assert router.bias is None or router.bias.dtype == torch.float32
    if not uses_triton(logits):
        ids, weights = choose_reference(logits, router)
        if rows is not None:
            ids[int(rows) :] = -1
        return routing_of(ids, weights, num_experts, router.num_shared, rows)
    ids = torch.empty(num_rows, num_taken, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, num_taken, dtype=torch.float32, device=logits.device)
    tiles, num_tiles, size, num_warps = None, 0, 0, _WARPS
    if num_rows <= FEW_ROWS:
        tiles = empty_tiles(num_rows, router.top_k, num_experts, router.num_shared, logits.device)
        num_tiles, size = tiles.pairs.shape
        num_warps = max(_WARPS, triton.next_power_of_2(num_rows))
    _route_kernel[(triton.cdiv(num_rows, num_warps),)](
        ids, weights, *(tiles or (None, None)), logits, router.bias, rows, router.scale, num_rows,
        num_tiles, logits.stride(0),
        NUM_EXPERTS=num_experts, TOP_K=router.top_k, NUM_SHARED=router.num_shared,
        IS_GATED=router.gate is not None, SIGMOID=router.sigmoid, OVER_ALL=router.over_all,
        GROUPS=router.num_groups, TOP_GROUPS=router.top_groups,
        EXPERTS=triton.next_power_of_2(num_experts), CHOICES=triton.next_power_of_2(num_taken),
        ROWS=num_warps, SIZE=size, num_warps=num_warps, **dependent_launch(logits.device),
    )  # fmt: skip
    if tiles is None:
        tiles = tiles_of(ids, num_experts, router.num_shared)
    return Routing(ids, weights, tiles, rows)


def choose_reference(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Ids and weights of each row's experts. Shape: as in `route` -> [T, k] int32, float32."""
    scores = scores_reference(logits, router)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, : router.top_k]
    sane = _sane(logits, router)
    if router.sigmoid:
        weights = sigmoid_reference(sane).gather(1, order)
        if not router.over_all:
            weights /= weights.sum(1, keepdim=True) + _TINY.value
    elif router.over_all:
        weights = sane.softmax(1).gather(1, order)
    else:
        weights = sane.gather(1, order).softmax(1)
    return with_shared(order.int(), weights * router.scale, logits, router)


def with_shared(
    ids: Tensor, weights: Tensor, logits: Tensor, router: Router
) -> tuple[Tensor, Tensor]:
    """The chosen experts of each row, followed by the shared ones.

    Shape: ids, weights [T, top_k], logits as in `route` -> [T, k] int32, float32
    """
    first, num_shared = router.num_experts_of(logits), router.num_shared
    shared = torch.arange(first, first + num_shared, dtype=torch.int32, device=ids.device)
    gate = torch.ones_like(weights[:, :1])
    if router.gate is not None:
        gate = sigmoid_reference(logits[:, first : first + 1].float())
    return (
        torch.cat((ids, shared.expand(len(ids), -1)), 1),
        torch.cat((weights, gate.expand(-1, num_shared)), 1),
    )


def scores_reference(logits: Tensor, router: Router) -> Tensor:
    """What experts are chosen by, -inf outside the best groups. Shape: as in `route` -> [T, E]."""
    sane = _sane(logits, router)
    if not router.sigmoid:
        return sane
    scores = sigmoid_reference(sane)
    if router.bias is not None:
        scores = scores + router.bias
    if router.top_groups == router.num_groups:
        return scores
    groups = scores.view(len(scores), router.num_groups, -1)
    best = groups.topk(2, 2).values.sum(2)
    chosen = best.argsort(dim=1, descending=True, stable=True)[:, : router.top_groups]
    left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
    return groups.masked_fill(left_out[..., None], -torch.inf).view_as(scores)


def _sane(logits: Tensor, router: Router) -> Tensor:
    """Those of experts. Shape: as in `route` -> [T, E]."""
    of_experts = logits[:, : router.num_experts_of(logits)].float()
    return of_experts.nan_to_num(_FLOOR, posinf=torch.inf, neginf=_FLOOR)


def routing_of(
    ids: Tensor, weights: Tensor, num_experts: int, num_shared: int = 0, rows: Tensor | None = None
) -> Routing:
    """A routing whose experts are chosen already. Shape: [T, k] each."""
    return Routing(ids, weights, tiles_of(ids, num_experts, num_shared), rows)


@triton.jit(do_not_specialize=["rows_ptr", "num_rows", "num_tiles"])
def _route_kernel(
    ids_ptr,  # [num_rows, TOP_K + NUM_SHARED]
    weights_ptr,  # as ids
    experts_ptr,  # [num_tiles], or None
    pairs_ptr,  # [num_tiles, SIZE], or None
    logits_ptr,  # [num_rows, NUM_EXPERTS and, IS_GATED, one or more]
    bias_ptr,  # [NUM_EXPERTS], or None
    rows_ptr,  # [1], the end of a longer tensor and so at any address; or None
    weight_scale,
    num_rows,
    num_tiles,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    IS_GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    OVER_ALL: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: ROWS rows. The only one lists them, if tiles are given."""
    TAKEN: tl.constexpr = TOP_K + NUM_SHARED
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    is_row = row < num_rows
    given = is_row[:, None] & (e < NUM_EXPERTS)[None, :]
    is_real = is_row
    if rows_ptr is not None:  # written before the pass
        is_real &= row < tl.load(rows_ptr)
    wait_for_inputs(DEPENDENT)
    if experts_ptr is not None:
        clear_tiles(
            experts_ptr, pairs_ptr, num_tiles, NUM_EXPERTS + NUM_SHARED, num_rows * TAKEN, SIZE
        )
    row_at = logits_ptr + row.to(tl.int64) * logits_stride
    logits = tl.load(row_at[:, None] + e[None, :], mask=given, other=0.0).to(tl.float32)
    gate = tl.full([ROWS], 1.0, tl.float32)
    if NUM_SHARED > 0 and IS_GATED:
        gate = tl.load(row_at + NUM_EXPERTS, mask=is_row, other=0.0).to(tl.float32)
        gate = 1.0 / (1.0 + tl.exp(-gate))
    logits = tl.where(logits > _LEAST, logits, _LEAST)  # also what is not a number
    is_expert = (e < NUM_EXPERTS)[None, :]
    logits = tl.where(is_expert, logits, float("-inf"))
    best = tl.max(logits, 1)
    if SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-logits))
        left = share
        if bias_ptr is not None:
            left += tl.load(bias_ptr + e, mask=e < NUM_EXPERTS, other=0.0)[None, :]
        left = tl.where(is_expert, left, float("-inf"))
        if TOP_GROUPS < GROUPS:
            left = _of_best_groups(left, NUM_EXPERTS // GROUPS, GROUPS, TOP_GROUPS, EXPERTS)
    else:
        share = tl.exp(logits - best[:, None])
        left = logits

    # A warp adds up integers, or finds the largest, in one instruction.
    key = _in_order(left)
    share_bits = share.to(tl.int32, bitcast=True)
    # What is stored is gathered by choice: rows of experts would go through shared memory.
    c = tl.arange(0, CHOICES)[None, :]
    ids = tl.zeros([ROWS, CHOICES], tl.int32)
    shares = tl.zeros([ROWS, CHOICES], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for choice in tl.static_range(TOP_K):
        first = _first_largest(key, EXPERTS)
        is_now = e[None, :] == first[:, None]
        key = tl.where(is_now, _CHOSEN, key)
        its_share = tl.sum(tl.where(is_now, share_bits, 0), 1).to(tl.float32, bitcast=True)
        ids = tl.where(c == choice, first[:, None], ids)
        shares = tl.where(c == choice, its_share[:, None], shares)
        total += its_share
    if SIGMOID:
        total = tl.full([ROWS], 1.0, tl.float32) if OVER_ALL else total + _TINY
    elif OVER_ALL:
        total = tl.sum((share * _ONE).to(tl.int64), 1).to(tl.float32) / _ONE
        total = tl.where(best < float("inf"), total, float("nan"))
    weights = weight_scale * (shares / total[:, None])
    for s in tl.static_range(NUM_SHARED):
        ids = tl.where(c == TOP_K + s, NUM_EXPERTS + s, ids)
        weights = tl.where(c == TOP_K + s, gate[:, None], weights)
    pair = row[:, None] * TAKEN + c
    is_pair = is_row[:, None] & (c < TAKEN)
    tl.store(ids_ptr + pair, tl.where(is_real[:, None], ids, -1), mask=is_pair)
    tl.store(weights_ptr + pair, tl.where(is_real[:, None], weights, 0.0), mask=is_pair)
    if experts_ptr is not None:
        is_chosen = (key == _CHOSEN) & is_real[:, None]
        at = places_in_tiles(is_chosen, ids, NUM_EXPERTS, NUM_SHARED, SIZE)
        is_pair &= is_real[:, None]
        tl.debug_barrier()  # else what was cleared might be written last
        tl.store(pairs_ptr + at, pair, mask=is_pair)
        tl.store(experts_ptr + at // SIZE, ids, mask=is_pair)


@triton.jit
def _in_order(numbers):
    """Integers in the order of these numbers, none of them NaN."""
    bits = numbers.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(numbers == 0.0, 0, key)  # -0 as well


@triton.jit
def _first_largest(values, WIDTH: tl.constexpr):
    """Where each row has its largest number, or the first of them. Shape: [rows, WIDTH] -> rows."""
    i = tl.arange(0, WIDTH)[None, :]
    return tl.min(tl.where(values == tl.max(values, 1)[:, None], i, WIDTH), 1)


@triton.jit
def _of_best_groups(
    scores, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Scores of the best groups, -inf for others. Shape: [rows, EXPERTS]."""
    e = tl.arange(0, EXPERTS)[None, :]
    group = e // SIZE
    # Of each group, at the place of each of its experts.
    sums = tl.full(scores.shape, float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        inside = tl.where(group == g, scores, float("-inf"))
        is_largest = e == _first_largest(inside, EXPERTS)[:, None]
        both = tl.max(inside, 1) + tl.max(tl.where(is_largest, float("-inf"), inside), 1)
        sums = tl.where(group == g, both[:, None], sums)
    kept = tl.full(scores.shape, float("-inf"), tl.float32)
    for _ in tl.static_range(TOP_GROUPS):
        best = _first_largest(sums, EXPERTS)[:, None] // SIZE
        kept = tl.where(group == best, scores, kept)
        sums = tl.where(group == best, float("-inf"), sums)
    return kept

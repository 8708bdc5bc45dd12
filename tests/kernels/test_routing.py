"""Which experts rows choose, and the tiles in which experts compute them."""

from itertools import count

import pytest
import torch
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model import expert_tiles
from outrider.kernels.model.expert_tiles import tiles_of, tiles_reference
from outrider.kernels.model.routing import Router, choose_reference, route

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
_seeds = count()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(next(_seeds))).to(DEVICE)


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 2, 9, 40, 300])
@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 2), (32, 4)])
@pytest.mark.parametrize("over_all", [False, True])
def test_rows_get_their_best_experts(
    num_rows: int, num_experts: int, top_k: int, over_all: bool
) -> None:
    logits = randn(num_rows, num_experts + 3)[:, :num_experts]
    logits[0] = 1.0  # all alike
    logits[-1, 1:3] = torch.nan
    logits[-1, 3:] = -torch.inf
    router = Router(top_k, over_all)
    got = route(logits, router)
    ids, weights = choose_reference(logits, router)
    assert torch.equal(got.ids, ids)
    torch.testing.assert_close(got.weights, weights)
    assert torch.equal(got.ids[0], torch.arange(top_k, device=DEVICE, dtype=torch.int32))


SIGMOIDS = {
    "renormalised": Router(3, sigmoid=True, scale=2.5),
    "as they are": Router(3, over_all=True, sigmoid=True),
    "a bias": Router(3, sigmoid=True, bias=torch.linspace(-1, 1, 24)),
    "groups": Router(
        3, sigmoid=True, bias=torch.linspace(0.1, -0.1, 24), num_groups=4, top_groups=2, scale=1.5
    ),
}


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 9, 400])
@pytest.mark.parametrize("kind", sorted(SIGMOIDS))
def test_rows_choose_by_sigmoids(num_rows: int, kind: str) -> None:
    router = SIGMOIDS[kind]
    if router.bias is not None:
        router = router._replace(bias=router.bias.to(DEVICE))
    logits = randn(num_rows, 24)
    logits[0] = 1.0
    logits[-1, 20:] = torch.nan
    got = route(logits, router)
    ids, weights = choose_reference(logits, router)
    assert torch.equal(got.ids, ids)
    torch.testing.assert_close(got.weights, weights)


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 9, 200])
@pytest.mark.parametrize(("num_shared", "is_gated"), [(1, True), (3, True), (2, False), (0, True)])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_every_row_takes_the_shared_experts_last(
    num_rows: int, num_shared: int, is_gated: bool, sigmoid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "_SLICE", 256)  # several programs list an expert's pairs
    chosen = Router(2, sigmoid=sigmoid, scale=1.5)
    router = chosen._replace(num_shared=num_shared, gate=5 if is_gated else None)
    logits = randn(num_rows, 8 if is_gated else 5)
    if is_gated:
        logits[:, 5] += 9  # it is no expert's
    got, alone = route(logits, router), route(logits[:, :5], chosen)
    assert torch.equal(got.ids[:, :2], alone.ids)
    assert torch.equal(got.weights[:, :2], alone.weights)
    gate = logits[:, 5:6].sigmoid() if is_gated else torch.ones_like(logits[:, :1])
    for i in range(num_shared):
        assert (got.ids[:, 2 + i] == 5 + i).all()
        torch.testing.assert_close(got.weights[:, 2 + i], gate[:, 0])
    ids, weights = choose_reference(logits, router)
    assert torch.equal(got.ids, ids)
    torch.testing.assert_close(got.weights, weights)
    padded = route(logits, router, torch.tensor([num_rows * 2 // 3], device=DEVICE))
    is_real = torch.arange(num_rows, device=DEVICE) < num_rows * 2 // 3
    assert torch.equal(padded.ids, torch.where(is_real[:, None], ids, -1))
    assert (padded.weights[~is_real] == 0).all()
    for routing in (got, padded):
        tiles = tiles_reference(routing.ids, 5, num_shared)
        assert all(map(torch.equal, routing.tiles, tiles))


def test_groups_and_bias_decide_the_choice_alone() -> None:
    logits = torch.tensor([[2.0, -9, 1, 1, 0, 3]], device=DEVICE)
    bias = torch.tensor([0, 0, 0, 0.1, 0, 0], device=DEVICE)
    router = Router(2, sigmoid=True, bias=bias, num_groups=3, top_groups=1, scale=2.0)
    routing = route(logits, router)
    # The middle group has the best pair, and the bias puts the second of it first.
    assert routing.ids.tolist() == [[3, 2]]
    torch.testing.assert_close(routing.weights, torch.tensor([[1.0, 1.0]], device=DEVICE))


def test_infinite_logits_give_no_weights() -> None:
    logits = torch.tensor([[0, torch.inf, 1], [torch.inf, 0, torch.inf], [0, 1, 2]], device=DEVICE)
    expected = logits.topk(2).values.softmax(1)
    assert expected.isnan().all(1).tolist() == [True, True, False]
    torch.testing.assert_close(route(logits, Router(2)).weights, expected, equal_nan=True)
    expected = logits.softmax(1).gather(1, choose_reference(logits, Router(2))[0].long())
    shares = route(logits, Router(2, over_all=True)).weights
    torch.testing.assert_close(shares, expected, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 3, 16, 33, 300])
def test_every_pair_is_in_one_tile_of_its_expert(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = randn(num_rows, 8)
    logits[:, 3] += 2  # of which some expert has several tiles
    got = route(logits, Router(2))
    expected = tiles_reference(got.ids, 8)
    assert torch.equal(got.tiles.experts, expected.experts)
    assert torch.equal(got.tiles.pairs, expected.pairs)
    pairs, num_pairs = got.tiles.pairs, 2 * num_rows
    assert sorted(pairs[pairs < num_pairs].tolist()) == list(range(num_pairs))
    for expert, tile in zip(got.tiles.experts.tolist(), pairs, strict=True):
        inside = tile[tile < num_pairs]
        assert (got.ids.flatten()[inside.long()] == expert).all()
        assert (expert < 8) == bool(len(inside))
    # Of more ids, several programs list an expert's.
    monkeypatch.setattr(expert_tiles, "_SLICE", 256)
    many = route(logits, Router(2))
    assert all(map(torch.equal, (*got[:2], *got.tiles), (*many[:2], *many.tiles)))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes a minute in Triton's interpreter")
def test_slices_are_more_than_a_program_counts_at_once() -> None:
    ids = torch.randint(-1, 300, (9000, 8), dtype=torch.int32, device=DEVICE)
    assert all(map(torch.equal, tiles_of(ids, 300), tiles_reference(ids, 300)))

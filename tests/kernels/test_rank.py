"""Which drafts of a batch are verified: the likeliest, as many as were asked for."""

import numpy as np
import pytest
import torch
from verification import DEVICE, DRAWING_ROADS, ROADS, Batch, mixed_sampling, on_road, seated

from outrider.kernels.verify import rank as rank_module
from outrider.kernels.verify import verify as verify_module
from outrider.kernels.verify.rank import LEAST, NUM_RANGES, SURE, WIDTH, Ranked, rank

WIDTH_OF_BATCH = 32


def ranked(
    road: str,
    odds: torch.Tensor,
    most: int,
    *,
    slots: list[int] | None = None,
    num_drafts: list[int] | None = None,
    ratios: list[float] | None = None,
    by_range: torch.Tensor | None = None,
) -> Ranked:
    """All of K drafts of each row of odds, unless it is said otherwise."""
    slots = list(range(len(odds))) if slots is None else slots
    sequences = torch.zeros(4, WIDTH_OF_BATCH, dtype=torch.int32)
    floats, count = sequences.view(torch.float32), len(slots)
    sequences[0, :count] = torch.tensor(slots)
    sequences[1, :count] = torch.tensor(num_drafts or [odds.shape[1]] * count)
    floats[2, :count] = torch.tensor(ratios or [1.0] * count)
    floats[3, :NUM_RANGES] = (
        torch.linspace(0.02, 0.96, NUM_RANGES) if by_range is None else by_range
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_module, "uses_triton", lambda _: road == "kernel")
        return rank(sequences.to(DEVICE), count, most, odds.to(DEVICE))


def of_range(*ranges: list[int]) -> torch.Tensor:
    """Log odds in these ranges."""
    return LEAST + WIDTH * (torch.tensor(ranges, dtype=torch.float32) + 0.5)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("seed", range(8))
def test_the_likeliest_drafts_are_chosen_and_no_others(seed: int, road: str) -> None:
    generator = np.random.default_rng(seed)
    num_seqs, k, num_slots = *generator.integers(1, 9, 2).tolist(), 12
    odds = torch.from_numpy(generator.normal(0, 5, (num_slots, k))).float()
    odds[torch.from_numpy(generator.random((num_slots, k)) < 0.1)] = torch.nan
    slots = generator.permutation(num_slots)[:num_seqs].tolist()
    num_drafts = generator.integers(0, k + 1, num_seqs).tolist()
    ratios = generator.uniform(0.5, 1.5, num_seqs).tolist() if seed % 2 else [1.0] * num_seqs
    by_range = torch.linspace(0.02, 1.2, NUM_RANGES)
    keys, ranges = [], torch.full((num_seqs, k), -1)
    for i, slot in enumerate(slots):
        survival = np.float32(1.0)
        for j in range(num_drafts[i]):
            value = float(odds[slot, j])
            chance = np.float32(0.0)
            if value == value:
                ranges[i, j] = min(max(int((value - LEAST) // WIDTH), 0), NUM_RANGES - 1)
                chance = by_range[ranges[i, j]].numpy() * np.float32(ratios[i])
            survival *= min(chance, np.float32(SURE))
            keys.append((-survival, j, i))
    for most in range(len(keys) + 2):
        got = ranked(
            road, odds, most, slots=slots, num_drafts=num_drafts, ratios=ratios, by_range=by_range
        )
        chosen = [i for _, _, i in sorted(keys)[:most]]
        assert got.counts.tolist() == [chosen.count(i) for i in range(num_seqs)]
        assert torch.equal(got.ranges.cpu(), ranges.int())


@pytest.mark.parametrize("road", ROADS)
def test_of_equal_chances_the_earlier_draft_comes_first(road: str) -> None:
    sure = of_range([31, 31, 31], [31, 31, 31])
    always = torch.ones(NUM_RANGES)
    counts = [ranked(road, sure, m, by_range=always).counts.tolist() for m in range(8)]
    assert counts == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3], [3, 3]]


@pytest.mark.parametrize("road", ROADS)
def test_of_equal_chances_of_several_sequences_the_earlier_draft_comes_first(road: str) -> None:
    by_range = torch.zeros(NUM_RANGES)
    by_range[1], by_range[2] = 0.25, 0.5
    odds = of_range([2, 2], [1, 0])  # a quarter for the second draft, and for a first one
    counts = [ranked(road, odds, m, by_range=by_range).counts.tolist() for m in range(4)]
    assert counts == [[0, 0], [1, 0], [1, 1], [2, 1]]


@pytest.mark.parametrize("road", ROADS)
def test_a_draft_behind_an_unlikely_one_is_unlikely(road: str) -> None:
    odds = of_range([0, 31, 31], [16, 16, 16])
    assert ranked(road, odds, 3).counts.tolist() == [0, 3]


@pytest.mark.parametrize("road", ROADS)
def test_whose_drafts_were_accepted_more_often_gets_more(road: str) -> None:
    odds = of_range([16, 16], [16, 16])
    assert ranked(road, odds, 2, ratios=[0.5, 1.5]).counts.tolist() == [0, 2]


@pytest.mark.parametrize("road", ROADS)
def test_drafts_without_odds_come_last_in_order(road: str) -> None:
    odds = of_range([20, 20], [0, 0])
    odds[0, 0] = torch.nan
    counts = [ranked(road, odds, most).counts.tolist() for most in range(5)]
    assert counts == [[0, 0], [0, 1], [0, 2], [1, 2], [2, 2]]


@pytest.mark.parametrize("road", DRAWING_ROADS)
def test_log_odds_are_of_the_likeliest_token_whichever_is_drawn(road: str) -> None:
    """At the request's temperature, filtered or not; of greedy ones at 1."""
    vocab, generator = 2050, torch.Generator().manual_seed(0)
    sampling = mixed_sampling(24, seed=1)
    logits = (torch.randn(24, vocab + 3, generator=generator) * 4).to(DEVICE)
    logits[5, 7], logits[6] = torch.nan, -torch.inf
    logits[7, :-1] = -1e30  # all else is impossible
    logits[7, 3] = 0.0
    slot = torch.randperm(24, generator=generator).to(DEVICE)
    offset = torch.randint(0, 3, (24,), generator=generator).to(DEVICE)
    log_odds = torch.full((25, 3), 7.0, device=DEVICE)
    slots = seated(sampling, torch.full((24,), 5, device=DEVICE), slot.new_zeros(24, 3))
    with on_road(road):
        verify_module.draw_draft(logits, slots, slot, offset, None, vocab, log_odds=log_odds)
    temperature = sampling.temperature[slot]
    temperature = torch.where(temperature > 0, temperature, 1.0)
    q = (logits[:, :vocab].double() / temperature[:, None]).softmax(-1).amax(-1)
    expected = torch.logit(q).float()
    got = log_odds[slot, offset]
    assert got[5].isnan()
    assert got[6].isnan()
    assert got[7] > 13
    others = [i for i in range(24) if i not in (5, 6, 7)]
    torch.testing.assert_close(got[others], expected[others], rtol=1e-4, atol=1e-4)
    untouched = torch.ones_like(log_odds, dtype=torch.bool)
    untouched[slot, offset] = False
    assert (log_odds[untouched] == 7.0).all()


@pytest.mark.parametrize("road", DRAWING_ROADS)
def test_keeping_log_odds_changes_no_draft(road: str) -> None:
    batch = Batch(
        torch.Generator().manual_seed(0), [1] * 12, 300, torch.float32, mixed_sampling(12, seed=3)
    )
    drawn = []
    for log_odds in (None, torch.zeros(13, 1, device=DEVICE)):
        slot = torch.arange(12, device=DEVICE)
        slots = seated(batch.sampling, batch.positions, slot.new_zeros(12, 1))
        kept = batch.draft_logits.new_empty(13, 1, 300), torch.empty(13, 1, 4, device=DEVICE)
        with on_road(road):
            drawn.append(
                verify_module.draw_draft(
                    batch.draft_logits[:, 0], slots, slot, 0 * slot, kept, 300, log_odds=log_odds
                )
            )
    assert torch.equal(*drawn)

"""Draws and verification of a CPU in one compiled call each, against the references."""

import pytest
import torch
from torch import Tensor
from verification import (
    DRAWING_ROADS,
    Batch,
    draw_draft,
    equal,
    make_sampling,
    mixed_sampling,
    on_road,
)

from outrider.kernels.verify.cpu import probabilities, probabilities_reference, takes
from outrider.kernels.verify.sampling import STATE_LOG_Z, STATE_THRESHOLD, Rule
from outrider.kernels.verify.step import SlotContents
from outrider.kernels.verify.verify import draw_draft as draw_in_slots
from outrider.kernels.verify.verify import verify as verify_in_slots

pytestmark = pytest.mark.skipif("compiled" not in DRAWING_ROADS, reason="nothing was compiled here")
DTYPES = [torch.float32, torch.bfloat16]
NUM_SLOTS, COLUMNS = 9, 4


def check(batch: Batch) -> None:
    for one_hot in (False, True):
        ours, truth = batch.verify("compiled", one_hot), batch.verify("reference", one_hot)
        assert equal(ours, truth), (ours, truth, batch.sampling)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 97, 1025, 5000])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batch(dtype: torch.dtype, vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_drafts = [3, 0, 1, 5, 2, 4, 0, 2]
    width = [None, vocab + 3, max(1, vocab - 7)][seed % 3]
    sampling = mixed_sampling(len(num_drafts), vocab + seed)
    spread = (0.3, 3.0, 8.0)[seed % 3]
    check(Batch(generator, num_drafts, vocab, dtype, sampling, spread, width))


FILTERS: list[dict[str, float]] = [{}, {"top_k": 300}, {"top_p": 0.9}, {"min_p": 0.02}]


@pytest.mark.parametrize(
    ("rule", "filters"),
    [
        # Each rule and each filter at once.
        pytest.param(rule, filters, marks=() if i % 3 == int(rule) else pytest.mark.deep)
        for i, filters in enumerate(FILTERS)
        for rule in Rule
    ],
)
def test_a_real_vocabulary(rule: Rule, filters: dict[str, float]) -> None:
    """Narrow and flat rows, close to their drafts."""
    sampling = make_sampling(6, temperature=0.8, rule=rule, seed=3, **filters)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    for spread in (1.0, 4.0):
        check(
            Batch(
                generator, [2, 4, 0, 3, 4, 4], 49_152, torch.bfloat16, sampling, spread, noise=0.1
            )
        )


@pytest.mark.parametrize("seed", range(6))
def test_no_more_drafts_are_accepted_where_a_bad_row_has_no_mass(seed: int) -> None:
    """How much of a row after drafts is left decides the rule `block`, and NaN has no mass."""
    sampling = make_sampling(8, rule=Rule.BLOCK, seed=seed)
    batch = Batch(torch.Generator().manual_seed(seed), [3] * 8, 97, torch.float32, sampling)
    batch.target_logits[1::4, seed] = (torch.nan, torch.inf)[seed % 2]
    check(batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 1500])
def test_drafts_and_their_states(dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(64, vocab + 4, generator=generator)).to(dtype)
    for row, value in ((3, torch.nan), (4, torch.inf), (5, -torch.inf)):
        logits[row, 1:3] = value
    logits[6] = -torch.inf
    sampling, anchor = mixed_sampling(64, 11), torch.arange(64) * 5
    arguments = logits, sampling, anchor + 2, anchor, vocab
    with on_road("reference"):
        expected = draw_draft(*arguments)
    with on_road("compiled"):
        drawn = draw_draft(*arguments)
    assert torch.equal(drawn.token_ids, expected.token_ids)
    is_bad = expected.state[:, STATE_LOG_Z].isnan()
    assert is_bad.tolist() == [row in (3, 4, 6) for row in range(64)]
    assert torch.equal(drawn.state[:, STATE_LOG_Z].isnan(), is_bad)
    torch.testing.assert_close(drawn.state[~is_bad], expected.state[~is_bad], rtol=1e-6, atol=1e-6)
    exact = drawn.state[~is_bad, STATE_THRESHOLD:], expected.state[~is_bad, STATE_THRESHOLD:]
    assert torch.equal(*exact)


def slots_of(token_ids: Tensor, draws: bool = False, seed: int = 0) -> SlotContents:
    """Slots of greedy requests, or of all kinds. Shape: token_ids [NUM_SLOTS, width]."""
    num_tokens = torch.arange(NUM_SLOTS) % 3 + 1
    num_tokens[-1] = 0
    greedy = make_sampling(NUM_SLOTS, temperature=0)
    sampling = mixed_sampling(NUM_SLOTS, seed) if draws else greedy
    return SlotContents(token_ids.clone(), num_tokens, sampling)


def some_logits(num_rows: int, vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows with ties, and some with NaN, inf and nothing finite; wider than the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-5, 5, (num_rows, vocab + 3), generator=generator).to(dtype)
    rows[:, vocab:] = 99
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        if seed % 2 and 3 * row + 1 < num_rows:
            rows[3 * row + 1, -1 if value != -torch.inf else slice(None)] = value
            rows[3 * row + 1, vocab - 1] = value
    return rows


def drafted(
    slots: SlotContents, vocab: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draft logits of each slot, and their states; some drafts were not drawn but chosen."""
    logits = (2 * torch.randn(NUM_SLOTS, COLUMNS, vocab, generator=generator)).to(dtype)
    state = torch.empty(NUM_SLOTS, COLUMNS, 4)
    for j in range(COLUMNS):
        with on_road("reference"):
            position = slots.num_tokens + j
            drawn = draw_draft(logits[:, j], slots.sampling, position, slots.num_tokens, vocab)
        state[:, j] = drawn.state
    state[::4, 1, STATE_LOG_Z] = torch.nan
    return logits, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 1000])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_as_many_drafts_are_accepted_in_slots_as_by_the_reference(
    dtype: torch.dtype, vocab: int, draws: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slot = torch.tensor([3, 0, 8, 5, 8], dtype=torch.int32)  # the last one twice: nobody
    num_drafts = torch.randint(0, COLUMNS + 1, (len(slot),), generator=generator).int()
    num_drafts[slot == NUM_SLOTS - 1] = 0
    cu_rows = torch.cat((torch.zeros(1), (num_drafts + 1).cumsum(0))).int()
    logits = some_logits(int(cu_rows[-1]), vocab, dtype, seed)
    token_ids = torch.randint(0, vocab, (NUM_SLOTS, 12), generator=generator).int()
    first = slots_of(token_ids)
    for i, s in enumerate(slot.tolist()[:-1]):  # drafts that are often accepted
        best = logits[int(cu_rows[i]) : int(cu_rows[i + 1]), :vocab].float().nan_to_num()
        at = int(first.num_tokens[s])
        token_ids[s, at : at + len(best) - 1] = best.argmax(1)[:-1].int()
        if len(best) > 2 and seed % 3:
            token_ids[s, at + 1] = 0
    mine, theirs = (slots_of(token_ids, draws, seed) for _ in range(2))
    kept = drafted(theirs, vocab, dtype, generator) if draws and seed % 3 else None

    outcomes = []
    for road, slots in (("compiled", mine), ("reference", theirs)):
        with on_road(road):
            outcomes.append(
                verify_in_slots(
                    logits, cu_rows, slots, slot, num_drafts, COLUMNS, kept, vocab, draws=draws
                )
            )
    assert torch.equal(*outcomes)
    assert torch.equal(mine.num_tokens, theirs.num_tokens)
    for s in range(NUM_SLOTS - 1):
        known = int(mine.num_tokens[s])
        assert torch.equal(mine.token_ids[s, :known], theirs.token_ids[s, :known])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 33, 1000])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_in_slots_are_those_of_the_reference(
    dtype: torch.dtype, vocab: int, draws: bool, seed: int
) -> None:
    slot, offset = torch.tensor([3, 0, 8, 5, 6]), torch.tensor([0, 2, 0, 1, 2])
    logits = some_logits(len(slot), vocab, dtype, seed)
    none = torch.zeros(NUM_SLOTS, 12).int()
    mine, theirs = (slots_of(none, draws, seed) for _ in range(2))
    kept, kept_theirs = (
        (torch.zeros(NUM_SLOTS, COLUMNS, vocab + 3).to(dtype), torch.zeros(NUM_SLOTS, COLUMNS, 4))
        for _ in range(2)
    )

    drawn = []
    for road, slots, its in (("compiled", mine, kept), ("reference", theirs, kept_theirs)):
        with on_road(road):
            its = its if draws else None
            drawn.append(draw_in_slots(logits, slots, slot, offset, its, vocab, draws=draws))
    assert torch.equal(*drawn)
    assert torch.equal(mine.token_ids, theirs.token_ids)
    assert torch.equal(mine.num_tokens, theirs.num_tokens)
    assert torch.equal(*(x[0].view(torch.uint8) for x in (kept, kept_theirs)))
    is_bad = kept_theirs[1][..., STATE_LOG_Z].isnan()
    assert torch.equal(kept[1][..., STATE_LOG_Z].isnan(), is_bad)
    torch.testing.assert_close(kept[1][~is_bad], kept_theirs[1][~is_bad], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 16, 1003])
def test_probabilities_are_those_of_the_softmax(dtype: torch.dtype, width: int) -> None:
    logits = (4 * torch.randn(6, width + 2)).to(dtype)[:, :width]
    logits[2, 1:] = -torch.inf
    token_ids = torch.tensor([0, 1, 0, 2, width - 1, 1])
    got = torch.from_numpy(probabilities(logits, token_ids))
    expected = torch.from_numpy(probabilities_reference(logits, token_ids))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_other_logits_are_left_to_the_reference() -> None:
    dense = torch.zeros(2, 3)
    with on_road("compiled"):
        assert takes(dense)
        assert takes(dense, dense.bfloat16())
        for other in (dense.double(), torch.zeros(3, 2).t()):
            assert not takes(other)
            assert not takes(dense, other)

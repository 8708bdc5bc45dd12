"""Requests in slots: read where they sit, their tokens written, and nothing else."""

from typing import NamedTuple

import pytest
import torch
from verification import DEVICE, Batch, Verified, equal, make_sampling, mixed_sampling, on_road

from outrider.kernels.verify.sampling import STATE_LOG_Z, Sampling
from outrider.kernels.verify.step import SlotContents
from outrider.kernels.verify.verify import draw_draft, verify

NUM_SLOTS, WIDTH, VOCAB = 9, 64, 97
DUMMY = NUM_SLOTS - 1
UNTOUCHED = 55_555


class Seats(NamedTuple):
    slots: SlotContents
    kept: tuple[torch.Tensor, torch.Tensor]  # [NUM_SLOTS, K, V'] and [NUM_SLOTS, K, 4]


def seat(batch: Batch, seats: list[int]) -> Seats:
    """The batch's requests in these slots, all others full of what is not theirs."""
    _, columns, width = batch.draft_logits.shape
    known = torch.full((NUM_SLOTS,), 5, device=DEVICE)
    known[DUMMY] = 0
    fields = mixed_sampling(NUM_SLOTS, 99)
    sampling = Sampling(*(field.clone() for field in fields))
    sampling.temperature[DUMMY] = 0
    slots = SlotContents(
        torch.full((NUM_SLOTS, WIDTH), UNTOUCHED, dtype=torch.int32, device=DEVICE), known, sampling
    )
    logits = torch.full((NUM_SLOTS, columns, width), 7.0, device=DEVICE)
    kept = logits.to(batch.draft_logits), torch.full((NUM_SLOTS, columns, 4), 7.0, device=DEVICE)
    for i, slot in enumerate(seats):
        if slot == DUMMY:
            continue
        known[slot] = batch.positions[i]
        for mine, theirs in zip(sampling, batch.sampling, strict=True):
            mine[slot] = theirs[i]
        at = int(known[slot])
        slots.token_ids[slot, at : at + columns] = batch.draft_ids[i].int()
        kept[0][slot], kept[1][slot] = batch.draft_logits[i], batch.state[i]
    return Seats(slots, kept)


def make_batch(num_drafts: list[int], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sampling = mixed_sampling(len(num_drafts), seed)
    batch = Batch(generator, num_drafts, VOCAB, torch.bfloat16, sampling, noise=0.1)
    batch.target_logits[seed % len(batch.target_logits), 3] = torch.nan
    return batch


def run(batch: Batch, seats: list[int], seated: Seats, num_columns: int) -> Verified:
    slot = torch.tensor(seats, dtype=torch.int32, device=DEVICE)
    out = verify(
        batch.target_logits, batch.cu_rows, seated.slots, slot, batch.num_drafts, num_columns,
        seated.kept, VOCAB,
    )  # fmt: skip
    return Verified.of(out)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_drafts", [[2, 1, 0, 3], [0, 0, 0, 0]])
def test_requests_are_read_and_written_where_they_sit(
    num_drafts: list[int], seed: int, road: str
) -> None:
    """Whichever slots they have; the others, the known tokens and what is kept stay as they are."""
    batch, seats = make_batch(num_drafts, seed), [5, 0, 7, 3]
    columns = max(num_drafts)
    expected = batch.verify("reference")
    seated = seat(batch, seats)
    if not columns:  # a plain step of an engine that drafts
        logits, state = seated.kept
        empty = logits.new_zeros(NUM_SLOTS, 3, VOCAB), state.new_zeros(NUM_SLOTS, 3, 4)
        seated = seated._replace(kept=empty)
    token_ids, known = seated.slots.token_ids.clone(), seated.slots.num_tokens.clone()
    kept = tuple(x.clone() for x in seated.kept)
    with on_road(road):
        verified = run(batch, seats, seated, columns)
    assert equal(verified, expected)
    for i, slot in enumerate(seats):
        at = int(known[slot])
        token_ids[slot, at : at + columns + 1] = verified.token_ids[i].clamp_min(0).int()
        known[slot] += verified.num_tokens[i]
    assert torch.equal(seated.slots.token_ids, token_ids)
    assert torch.equal(seated.slots.num_tokens, known)
    assert all(torch.equal(x, y) for x, y in zip(seated.kept, kept, strict=True))


def test_the_dummy_slot_stays_without_known_tokens(road: str) -> None:
    """However many requests it stands for, with drafts and without; the others are unharmed."""
    batch = make_batch([2, 3, 0, 1, 2], 4)
    expected, seats = batch.verify("reference"), [DUMMY, 2, DUMMY, 6, DUMMY]
    seated = seat(batch, seats)
    with on_road(road):
        verified = run(batch, seats, seated, 3)
    assert int(seated.slots.num_tokens[DUMMY]) == 0
    for i in (1, 3):
        assert equal(*(Verified(*(x[i] for x in each)) for each in (verified, expected)))


@pytest.mark.parametrize("keeps", [False, True])
def test_drafts_are_written_with_what_they_were_drawn_from(keeps: bool, road: str) -> None:
    """After the known tokens, which they do not become; also several of one sequence."""
    seats, offsets = [5, 0, 5, DUMMY, 0, 2], [0, 2, 1, 0, 1, 0]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(seats), 5003, generator=generator).to(DEVICE)[:, :5000]
    logits[1, 8] = torch.nan
    slot, offset = torch.tensor(seats, device=DEVICE), torch.tensor(offsets, device=DEVICE)
    dtype = torch.float32 if road == "compiled" else torch.float16
    results = []
    for each in ("reference", road):
        slots = seat(make_batch([1, 3, 0], 2), seats[:2]).slots
        sampling = make_sampling(NUM_SLOTS)  # unfiltered: their states are unique
        sampling.temperature.copy_(torch.linspace(0.5, 1.5, NUM_SLOTS))
        slots = slots._replace(sampling=sampling)
        known = slots.num_tokens.clone()
        kept = (
            torch.zeros(NUM_SLOTS, 3, 5000, dtype=dtype, device=DEVICE),
            torch.zeros(NUM_SLOTS, 3, 4, device=DEVICE),
        )
        with on_road(each):
            drawn = draw_draft(logits, slots, slot, offset, kept if keeps else None, 4990)
        assert torch.equal(slots.num_tokens, known)
        assert torch.equal(slots.token_ids[slot, known[slot] + offset], drawn.int())
        results.append((drawn, slots.token_ids, kept))
    for x, y in zip(results[0][:2], results[1][:2], strict=True):
        assert torch.equal(x, y)
    (logits_kept, state), (expected, expected_state) = results[1][2], results[0][2]
    assert torch.equal(logits_kept.nan_to_num(), expected.nan_to_num())
    assert bool(logits_kept[slot, offset].isnan().any()) is keeps
    is_bad = state[..., STATE_LOG_Z].isnan()
    assert is_bad.nonzero().tolist() == ([[0, 2]] if keeps else [])
    assert bool(expected_state[0, 2, STATE_LOG_Z].isnan()) is keeps
    torch.testing.assert_close(state[~is_bad], expected_state[~is_bad], rtol=1e-6, atol=1e-6)

"""Slots read and written by the kernels, against plain torch."""

import pytest
import torch
from verification import HAS_KERNELS

from outrider.kernels.verify.drafts import DraftSample, Verified
from outrider.kernels.verify.sampling import Sampling
from outrider.kernels.verify.slot_rows import (
    SlotState,
    read_slots,
    read_slots_reference,
    write_draft,
    write_draft_reference,
    write_verified,
    write_verified_reference,
)

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")

NUM_SLOTS, WIDTH, NUM_ROWS = 50, 30, 40


@pytest.fixture
def slots(device: torch.device) -> SlotState:
    generator = torch.Generator().manual_seed(0)
    floats = torch.rand(3, NUM_SLOTS, generator=generator).to(device)
    ints = torch.randint(0, 100, (3, NUM_SLOTS), generator=generator).to(device)
    seed = ints[2] - (1 << 62)
    num_tokens = torch.randint(1, 9, (NUM_SLOTS,), generator=generator)
    num_tokens[-1] = 0  # nobody's
    return SlotState(
        torch.randint(0, 1000, (NUM_SLOTS, WIDTH), generator=generator).int().to(device),
        num_tokens.to(device),
        Sampling(floats[0], ints[0].int(), floats[1], floats[2], seed, ints[1].int()),
    )


@pytest.fixture
def slot(device: torch.device) -> torch.Tensor:
    return torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:NUM_ROWS].to(
        device
    )


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize("has_offset", [False, True])
def test_rows_are_read(
    num_drafts: int, has_offset: bool, slots: SlotState, slot: torch.Tensor
) -> None:
    arguments = (slots, slot.int(), num_drafts, slot % 3 if has_offset else None)
    got, expected = read_slots(*arguments), read_slots_reference(*arguments)
    for x, y in zip((*got.sampling, *got[1:]), (*expected.sampling, *expected[1:]), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_draft_is_written_with_what_it_was_drawn_from(
    keeps: bool, slots: SlotState, slot: torch.Tensor, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(2)
    position, offset, token_ids = slot % 20, slot % 3, slot + 2000
    logits = torch.randn(NUM_ROWS, 5003, generator=generator).to(device)[:, :5000]
    state = torch.randn(NUM_ROWS, 4, generator=generator).to(device)
    kept = (
        torch.zeros(NUM_SLOTS, 3, 5000).half().to(device),
        torch.zeros(NUM_SLOTS, 3, 4).to(device),
    )
    results = []
    for write in (write_draft, write_draft_reference):
        written = slots._replace(token_ids=slots.token_ids.clone())
        places = tuple(x.clone() for x in kept)
        drawn = DraftSample(token_ids, state)
        write(written, slot, position, offset, drawn, logits, places if keeps else None)
        results.append((written.token_ids, *places))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("num_columns", [1, 6])
def test_what_was_verified_is_written(
    num_columns: int, slots: SlotState, slot: torch.Tensor
) -> None:
    num_tokens = 1 + slot.int() % num_columns
    column = torch.arange(num_columns, device=slot.device)
    token_ids = torch.where(column < num_tokens[:, None], slot[:, None] + 7 * column, -1)
    verified = Verified(token_ids, num_tokens, slot % 5 == 0)
    results = []
    for write in (write_verified, write_verified_reference):
        written = slots._replace(
            token_ids=slots.token_ids.clone(), num_tokens=slots.num_tokens.clone()
        )
        out = write(written, slot.int(), slot % 20, verified)
        assert written.num_tokens[-1] == 0
        results.append((written.token_ids, written.num_tokens, out))
    for x, y in zip(*results, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)

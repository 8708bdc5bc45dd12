"""Greedy draws of a CPU in one call, against the references."""

import pytest
import torch
from torch import Tensor

from outrider.kernels.cpu.layers import compiled
from outrider.kernels.verify.greedy import (
    draft_greedy,
    probabilities,
    probabilities_reference,
    takes,
    verify_greedy,
)
from outrider.kernels.verify.sampling import Rule, Sampling
from outrider.kernels.verify.slot_rows import (
    SlotState,
    read_slots_reference,
    write_draft_reference,
    write_verified_reference,
)
from outrider.kernels.verify.verify import draft_sample, verify

pytestmark = pytest.mark.skipif(compiled() is None, reason="no layers were compiled here")
NUM_SLOTS, COLUMNS = 9, 4
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what is compared with, whether or not there is an interpreter for kernels."""
    for module in ("verify", "greedy"):
        name = f"outrider.kernels.verify.{module}.uses_triton"
        monkeypatch.setattr(name, lambda tensor: False)


def slots_of(token_ids: Tensor) -> SlotState:
    """Shape: token_ids [NUM_SLOTS, width]."""
    zeros = torch.zeros(NUM_SLOTS)
    ints = zeros.int()
    num_tokens = torch.arange(NUM_SLOTS) % 3 + 1
    num_tokens[-1] = 0
    rule = torch.full_like(ints, Rule.TOKEN)
    sampling = Sampling(zeros, ints, zeros + 1, zeros, torch.zeros(NUM_SLOTS).long(), rule)
    return SlotState(token_ids.clone(), num_tokens, sampling)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_as_many_drafts_stand_as_by_the_reference(
    dtype: torch.dtype, vocab: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slot = torch.tensor([3, 0, 8, 5, 8], dtype=torch.int32)  # the last one twice: nobody
    num_drafts = torch.randint(0, COLUMNS + 1, (len(slot),), generator=generator).int()
    num_drafts[slot == NUM_SLOTS - 1] = 0
    cu_rows = torch.cat((torch.zeros(1), (num_drafts + 1).cumsum(0))).int()
    logits = some_logits(int(cu_rows[-1]), vocab, dtype, seed)
    token_ids = torch.randint(0, vocab, (NUM_SLOTS, 12), generator=generator).int()
    first = slots_of(token_ids)
    for i, s in enumerate(slot.tolist()[:-1]):  # drafts that often stand
        best = logits[int(cu_rows[i]) : int(cu_rows[i + 1]), :vocab].float().nan_to_num()
        at = int(first.num_tokens[s])
        token_ids[s, at : at + len(best) - 1] = best.argmax(1)[:-1].int()
        if len(best) > 2 and seed % 3:
            token_ids[s, at + 1] = 0
    mine, theirs = slots_of(token_ids), slots_of(token_ids)

    got = verify_greedy(mine, cu_rows[:-1], slot, num_drafts, COLUMNS, logits, vocab)
    rows = read_slots_reference(theirs, slot, COLUMNS)
    verified = verify(
        logits, cu_rows, rows.draft_ids, num_drafts, None, None, rows.sampling, rows.anchor,
        vocab, samples=False,
    )  # fmt: skip
    expected = write_verified_reference(theirs, slot, rows.anchor, verified)

    assert torch.equal(got, expected)
    assert torch.equal(mine.num_tokens, theirs.num_tokens)
    for s in range(NUM_SLOTS - 1):
        known = int(mine.num_tokens[s])
        assert torch.equal(mine.token_ids[s, :known], theirs.token_ids[s, :known])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 33, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_those_of_the_reference(dtype: torch.dtype, vocab: int, seed: int) -> None:
    slot, offset = torch.tensor([3, 0, 8, 5, 6]), torch.tensor([0, 2, 0, 1, 2])
    logits = some_logits(len(slot), vocab, dtype, seed)
    mine, theirs = (slots_of(torch.zeros(NUM_SLOTS, 12).int()) for _ in range(2))

    got = draft_greedy(mine, slot, offset, logits, vocab)
    rows = read_slots_reference(theirs, slot, 0, offset)
    drawn = draft_sample(logits, rows.sampling, rows.position, rows.anchor, vocab, samples=False)
    write_draft_reference(theirs, slot, rows.position, offset, drawn, logits, None)

    assert torch.equal(got, drawn.token_ids)
    assert torch.equal(mine.token_ids, theirs.token_ids)


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
    assert takes(torch.zeros(2, 3))
    assert not takes(torch.zeros(2, 3).double())
    assert not takes(torch.zeros(3, 2).t())

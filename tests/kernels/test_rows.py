"""Rows of a batch are laid out alike by a kernel and by plain torch."""

import random
from typing import NamedTuple

import pytest
import torch
from verification import DEVICE

from outrider.kernels.model.rows import (
    keep_last_rows,
    keep_last_rows_reference,
    last_known_rows,
    last_known_rows_reference,
    lay_out,
    lay_out_reference,
    places_of,
)

NUM_SLOTS, WIDTH, PAGE = 6, 3000, 16
DUMMY = NUM_SLOTS - 1


class Slots(NamedTuple):
    num_tokens: torch.Tensor
    token_ids: torch.Tensor
    block_table: torch.Tensor


def expected_rows(
    sequences: list[tuple[int, int, int, int]], num_rows: int, num_logits: int, slots: Slots
) -> list[list[int]]:
    """The fields of BatchRows, then tokens and logits."""
    known, token_ids, pages = (x.tolist() for x in slots)
    rows = [
        (slot, known[slot] + start + i)
        for slot, start, length, _ in sequences
        for i in range(length)
    ]
    ends = [sum(each[2] for each in sequences[:i]) for i in range(len(sequences) + 1)]
    logits = [
        ends[i + 1] - count + j for i, (*_, count) in enumerate(sequences) for j in range(count)
    ]
    rows += [(DUMMY, 0)] * (num_rows - len(rows))
    return [
        [slot for slot, _ in rows],
        [position for _, position in rows],
        [pages[slot][at // PAGE] * PAGE + at % PAGE for slot, at in rows],
        [each[0] for each in sequences],
        [known[slot] + start + length for slot, start, length, _ in sequences],
        ends,
        [token_ids[slot][at] for slot, at in rows],
        logits + [0] * (num_logits - len(logits)),
    ]


@pytest.fixture
def slots() -> Slots:
    generator = torch.Generator().manual_seed(0)
    return Slots(
        torch.tensor([7, 300, 40, 1, 2, 0]),
        torch.randint(0, 1000, (NUM_SLOTS, WIDTH), generator=generator).int(),
        torch.randint(0, 90, (NUM_SLOTS, -(-WIDTH // PAGE)), generator=generator).int(),
    )


VERIFIED, PREFILLED, DECODED = (2, -1, 4, 4), (1, -300, 290, 0), (4, -1, 1, 1)
SCORED = (0, -7, 7, 3)  # with logits of its prompt
NOBODY = (DUMMY, 0, 0, 0)


@pytest.mark.parametrize(
    ("sequences", "num_rows", "num_logits"),
    [
        ([DECODED], 1, 1),
        ([VERIFIED, PREFILLED, DECODED], 295, 5),
        ([SCORED, VERIFIED, DECODED, NOBODY], 16, 12),
        ([NOBODY, NOBODY], 4, 4),
        ([(2, -1, 3, 0), (3, -1, 0, 0), (4, -1, 2, 0), NOBODY], 6, 0),  # blocks of a head
        ([(DUMMY, 0, 2900, 1)], 2900, 1),  # a rehearsal, in more parts than there are programs
        ([VERIFIED, *[NOBODY] * 130, DECODED, *[NOBODY] * 4], 9, 8),
    ],
)
def test_rows_are_built_from_four_numbers_a_sequence(
    sequences: list[tuple[int, int, int, int]], num_rows: int, num_logits: int, slots: Slots
) -> None:
    integers = torch.tensor(sequences).T.contiguous().to(DEVICE)
    on_device = Slots(*(x.to(DEVICE) for x in slots))
    expected = expected_rows(sequences, num_rows, num_logits, slots)
    for build in (lay_out, lay_out_reference):
        rows, *others = build(integers, num_rows, num_logits, *on_device, PAGE)
        got = (*rows, *others)
        assert [x.tolist() for x in got] == expected
        assert {x.dtype for x in got} == {torch.int64}


def test_random_batches_are_laid_out_alike(slots: Slots) -> None:
    rng = random.Random(0)
    on_device = Slots(*(x.to(DEVICE) for x in slots))
    for ahead in (0, 1, 0, 1, 0, 1):
        sequences = []
        for slot in rng.sample(range(DUMMY), rng.randint(0, DUMMY)):
            start = -rng.randint(1, int(slots.num_tokens[slot]))
            length = rng.randint(0, 60)
            sequences.append((slot, start, length, rng.randint(0, length)))
        sequences += [NOBODY] * rng.randint(not sequences, 3)
        shape = (
            sum(each[2] for each in sequences) + rng.randint(0, 9),
            sum(each[3] for each in sequences) + rng.randint(0, 9),
        )
        integers = torch.tensor(sequences).T.to(DEVICE).contiguous()
        rows, *others = lay_out(integers, *shape, *on_device, PAGE, ahead)
        alike, *expected = lay_out_reference(integers, *shape, *on_device, PAGE, ahead)
        for x, y in zip((*rows, *others), (*alike, *expected), strict=True):
            assert torch.equal(x, y)


def test_other_layers_find_their_places_by_their_own_table(slots: Slots) -> None:
    other = torch.randint(0, 90, slots.block_table.shape, generator=torch.Generator()).int()
    sequences = torch.tensor([VERIFIED, PREFILLED, DECODED]).T.contiguous().to(DEVICE)
    on_device = Slots(*(x.to(DEVICE) for x in slots))
    rows, *_ = lay_out(sequences, 300, 5, *on_device, PAGE)
    for table, expected in (
        (on_device.block_table, rows.places),
        (
            other.to(DEVICE),
            lay_out(sequences, 300, 5, *on_device[:2], other.to(DEVICE), PAGE)[0].places,
        ),
    ):
        assert torch.equal(places_of(rows.slot_of_row, rows.positions, table, PAGE), expected)


@pytest.mark.parametrize("width", [8, 300])
def test_the_row_before_the_last_known_token_is_kept(width: int) -> None:
    slots = torch.tensor([4, 0, 2, 3, 5])  # the last is the dummy
    # Two of three drafts are accepted, none is, a prompt ends, another goes on; padding.
    num_tokens = torch.tensor([41, 0, 9, 30, 7, 0])
    seq_lens = torch.tensor([8, 43, 8, 12, 0])
    bounds = torch.tensor([0, 4, 8, 16, 20, 20])
    y = torch.randn(20, width, generator=torch.Generator().manual_seed(0))
    given = [x.to(DEVICE) for x in (y, slots, seq_lens, bounds, num_tokens)]
    got, expected = torch.zeros(2, 6, width, device=DEVICE)
    keep_last_rows(got, *given)
    keep_last_rows_reference(expected, *given)
    assert torch.equal(got[:5], expected[:5])
    rows = torch.tensor([1, 4, 15, 19], device=DEVICE)
    assert torch.equal(got[[4, 0, 2, 3]], given[0][rows])
    assert not got[5].any()  # padding keeps nothing

    # These rows alone: padding has a row of its own, and keeps it as little.
    last, lens = last_known_rows(*given[1:])
    assert last.tolist() == [*rows.tolist(), 0]
    assert lens.tolist() == [6, 40, 8, 12, 1]
    for each in zip(last_known_rows_reference(*given[1:]), (last, lens), strict=True):
        assert torch.equal(*each)
    for keep in (keep_last_rows, keep_last_rows_reference):
        alone = torch.zeros_like(got)
        keep(alone, given[0][last], *given[1:], are_last=True)
        assert torch.equal(alone, got)

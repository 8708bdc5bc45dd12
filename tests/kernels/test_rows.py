"""Rows of a batch are looked up alike by a kernel and by plain torch."""

import pytest
import torch
from verification import DEVICE

from outrider.kernels.model.rows import (
    keep_last_rows,
    keep_last_rows_reference,
    read_rows,
    read_rows_reference,
)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("num_rows", [[1], [3, 1, 4], [300, 1]])
def test_rows_are_looked_up(num_rows: list[int], ahead: int) -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([4, 0, 2])[: len(num_rows)]
    num_tokens = torch.tensor([7, 0, 40, 0, 1])
    counts = torch.tensor(num_rows)
    arguments = [
        slots.repeat_interleave(counts),
        torch.cat([torch.arange(count) for count in num_rows]) - 1,
        slots,
        counts - 1,
        num_tokens,
        torch.randint(0, 1000, (5, 400), generator=generator).int(),
        torch.randint(0, 90, (5, 25), generator=generator).int(),
    ]
    arguments = [argument.to(DEVICE) for argument in arguments]
    got = read_rows(*arguments, 16, ahead)
    expected = read_rows_reference(*arguments, 16, ahead)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("width", [8, 300])
def test_the_row_before_the_last_known_token_is_kept(width: int) -> None:
    slots = torch.tensor([4, 0, 2, 3, 5])  # the last is the dummy
    # Two of three drafts stand, none does, a prompt ends, another goes on; padding.
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

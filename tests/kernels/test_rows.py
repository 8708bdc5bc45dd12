"""Rows of a batch are looked up alike by a kernel and by plain torch."""

import pytest
import torch

from outrider.kernels.model.rows import read_rows, read_rows_reference


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("num_rows", [[1], [3, 1, 4], [300, 1]])
def test_rows_are_looked_up(num_rows: list[int], ahead: int, device: torch.device) -> None:
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
    arguments = [argument.to(device) for argument in arguments]
    got = read_rows(*arguments, 16, ahead)
    expected = read_rows_reference(*arguments, 16, ahead)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)

"""Sampling parameters of rows, by the kernel."""

import pytest
import torch
from verification import HAS_KERNELS

from outrider.kernels.sampling import Sampling
from outrider.kernels.take_sampling import take_sampling


@pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
def test_each_row_gets_its_slots_parameters(device: torch.device) -> None:
    floats = torch.rand(3, 9, device=device)
    ints = torch.randint(0, 100, (3, 9), device=device)
    seed = ints[2] - (1 << 62)
    slots = Sampling(floats[0], ints[0].int(), floats[1], floats[2], seed, ints[1].int())
    index = torch.tensor([[8, 3], [3, 0], [0, 1]], device=device)[:, 0]  # not dense
    taken = take_sampling(slots, index)
    for got, expected in zip(taken, slots.take(index), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)

"""The first reading of a row, where its numbers are at their limits."""

import pytest
import torch
from verification import DEVICE, HAS_KERNELS, make_sampling

from outrider.kernels.verify.scan import scan, scan_reference

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")

LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
VOCAB = 2050


def rows() -> torch.Tensor:
    """Rows that end in masks, begin with them, hold nothing else, or reach to the limits."""
    x = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    x[0, 900:] = LOWEST
    x[1, :1030] = LOWEST
    x[2] = LOWEST
    x[3, 5:] = -torch.inf
    x[4, ::2], x[4, 7] = LOWEST, HIGHEST
    x[5] = x[5] * 1e-40  # subnormal
    x[6] = x[6] * 1e-3 + 60_000
    return x


@pytest.mark.parametrize("temperature", [1e-5, 3e-4, 1.0, 100.0, 1e30])
def test_sums_are_the_references_at_any_temperature(temperature: float) -> None:
    logits = rows().to(DEVICE)
    sampling = make_sampling(len(logits), temperature=temperature)
    slot = torch.arange(len(logits), device=DEVICE)
    got = scan(logits, VOCAB, None, slot, sampling)
    expected = scan_reference(logits, sampling, VOCAB)
    assert torch.equal(got.max, expected.max)
    # A block of -inf alone: its sum is of no consequence, but no NaN.
    torch.testing.assert_close(got.total, expected.total, rtol=1e-5, atol=1e-9)

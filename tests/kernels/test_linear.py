"""Fused linear layers against plain torch."""

import pytest
import torch
from verification import HAS_KERNELS

from outrider.kernels.linear import Norm, linear, linear_reference

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")


@pytest.mark.parametrize("num_rows", [1, 5, 17])
@pytest.mark.parametrize(("num_in", "num_out"), [(96, 50), (1100, 17)])
@pytest.mark.parametrize(
    ("with_norm", "gated", "with_residual", "with_bias"),
    [
        (False, False, False, False),
        (True, False, False, True),
        (True, True, False, False),
        (True, True, False, True),
        (False, False, True, False),
        (False, False, True, True),
    ],
)
def test_kernel_equals_reference(
    num_rows: int,
    num_in: int,
    num_out: int,
    with_norm: bool,
    gated: bool,
    with_residual: bool,
    with_bias: bool,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(num_rows)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    halves = 2 if gated else 1
    x = randn(num_rows, num_in + 3)[:, :num_in]  # rows need not follow each other
    weight = randn(halves * num_out, num_in) / num_in**0.5
    bias = randn(halves * num_out) if with_bias else None
    norm = Norm(randn(num_in), 1e-5) if with_norm else None
    residual = randn(num_rows, num_out) if with_residual else None
    expected = linear_reference(
        x,
        weight,
        bias,
        norm=norm,
        gated=gated,
        residual=residual.clone() if residual is not None else None,
    )
    out = linear(x, weight, bias, norm=norm, gated=gated, residual=residual)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert residual is None or out.data_ptr() == residual.data_ptr()

"""Gates of attention and of shared experts, against plain torch."""

import pytest
import torch
from random_tensors import normals
from verification import HAS_KERNELS

from outrider.kernels.model.sigmoid_gate import gate_heads, gate_rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}  # of float16 the last two bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_heads", "dim"), [(1, 40), (16, 256), (3, 128)])
def test_heads_are_multiplied_by_gates_that_lie_behind_queries(
    num_heads: int, dim: int, dtype: torch.dtype
) -> None:
    randn = normals(num_heads, dtype)
    y, qkv = randn(5, num_heads, dim), randn(5, (2 * num_heads + 2) * dim)
    gate = qkv[:, : 2 * num_heads * dim].view(5, num_heads, 2 * dim)[..., dim:]
    expected = y * gate.sigmoid()
    gate_heads(y, gate)
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("width", "num_in"), [(512, 2048), (2500, 100), (24, 32)])
def test_rows_are_multiplied_by_the_gate_of_their_inputs(
    width: int, num_in: int, dtype: torch.dtype
) -> None:
    randn = normals(width, dtype)
    y, x, weight = randn(5, width), randn(5, num_in), randn(num_in) / num_in**0.5
    gate = (x.double() @ weight.double()).to(dtype)[:, None]
    expected = y * gate.sigmoid()
    gate_rows(y, x, weight)
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_what_is_rounded_in_transformers_is_rounded_here() -> None:
    """The gate and its sigmoid: of products with unrounded ones some would differ."""
    if not HAS_KERNELS:
        pytest.skip("needs a GPU or Triton's interpreter")
    randn = normals(3, torch.float16)
    y, x, weight = randn(99, 512), randn(99, 256), randn(256) / 16
    gate = (x.float() @ weight.float()).half()[:, None]
    expected = (y.float() * gate.float().sigmoid().half().float()).half()
    unrounded = (y.float() * (x.float() @ weight.float()).sigmoid()[:, None]).half()
    gate_rows(y, x, weight)
    assert (y != expected).float().mean() < 0.02
    assert (unrounded != expected).float().mean() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_in", [300, 2048])
def test_the_bits_of_a_row_do_not_depend_on_its_company(num_in: int, dtype: torch.dtype) -> None:
    randn = normals(4, dtype)
    y, x, weight = randn(67, 96), randn(67, num_in), randn(num_in) / num_in**0.5
    all_rows = y.clone()
    gate_rows(all_rows, x, weight)
    for rows in (slice(0, 1), slice(5, 22), slice(66, 67)):
        some = y[rows].clone()
        gate_rows(some, x[rows], weight)
        assert torch.equal(some, all_rows[rows])

"""Gates of attention and of shared experts, against plain torch."""

import pytest
import torch
from random_tensors import normals
from verification import HAS_KERNELS

from outrider.kernels.model.sigmoid_gate import gate_heads

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
@pytest.mark.parametrize(("num_heads", "dim"), [(1, 512), (1, 2500), (3, 24)])
def test_a_head_may_have_one_gate(num_heads: int, dim: int, dtype: torch.dtype) -> None:
    randn = normals(dim, dtype)
    y, logits = randn(5, num_heads, dim), randn(5, 7 + num_heads)
    gate = logits[:, 7:, None]
    expected = y * gate.sigmoid()
    gate_heads(y, gate)
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_what_is_rounded_in_transformers_is_rounded_here() -> None:
    """The sigmoid of a gate: of products with unrounded ones some would differ."""
    if not HAS_KERNELS:
        pytest.skip("needs a GPU or Triton's interpreter")
    randn = normals(3, torch.float16)
    y, gate = randn(99, 1, 512), randn(99, 1, 1)
    expected = (y.float() * gate.float().sigmoid().half().float()).half()
    unrounded = (y.float() * gate.float().sigmoid()).half()
    gate_heads(y, gate)
    assert (y != expected).float().mean() < 0.02
    assert (unrounded != expected).float().mean() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_bits_of_a_row_do_not_depend_on_its_company(dtype: torch.dtype) -> None:
    randn = normals(4, dtype)
    y, logits = randn(67, 1, 96), randn(67, 9)
    gate, all_rows = logits[:, 8:, None], y.clone()
    gate_heads(all_rows, gate)
    for rows in (slice(0, 1), slice(5, 22), slice(66, 67)):
        some = y[rows].clone()
        gate_heads(some, gate[rows])
        assert torch.equal(some, all_rows[rows])

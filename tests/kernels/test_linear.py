"""Fused linear layers against plain torch."""

import pytest
import torch
from grids import pairwise
from products import FUSED, Fused, inputs_of
from random_tensors import normals
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model.linear import add_linear, linear, linear_reference
from outrider.kernels.model.rms_norm import Norm, rms_norm, rms_norm_reference

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")


@pytest.mark.parametrize(
    ("fused", "num_rows", "size"), pairwise(FUSED, [1, 2, 5, 17, 33], [(96, 50), (1100, 17)])
)
def test_kernel_equals_reference(fused: Fused, num_rows: int, size: tuple[int, int]) -> None:
    num_in, num_out = size
    x, bias, norm, residual = inputs_of(fused, num_rows, *size)
    weight = normals(num_out)(fused.num_outputs(num_out), num_in) / num_in**0.5
    if not fused.residual:
        expected = linear_reference(x, weight, bias, norm=norm, gated=fused.gated)
        out = linear(x, weight, bias, norm=norm, gated=fused.gated)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        return
    expected = residual + linear_reference(x, weight, bias)
    normed = add_linear(residual, x, weight, bias, norm=norm)
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)
    if normed is not None:
        assert norm is not None
        torch.testing.assert_close(normed, rms_norm_reference(expected, norm), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fused", "num_in", "num_rows"),
    pairwise([(True, False), (True, True), (False, False)], [256, 300, 384], [3, 20]),
)
def test_weights_in_half_precision_are_multiplied_the_same(
    fused: tuple[bool, bool], num_in: int, num_rows: int
) -> None:
    with_norm, gated = fused
    randn = normals(num_rows, torch.float16)
    x, weight = randn(num_rows, num_in), randn(2 * 70 if gated else 70, num_in) / 16
    norm = Norm(randn(num_in), 1e-5) if with_norm else None
    expected = linear_reference(
        x.float(),
        weight.float(),
        norm=Norm(norm.weight.float(), norm.eps) if norm is not None else None,
        gated=gated,
    )
    out = linear(x, weight, norm=norm, gated=gated)
    torch.testing.assert_close(out.float(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("num_rows", "num_out"), [(1, 32), (3, 32), (20, 70), (40, 70)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_few_outputs_of_many_inputs(num_rows: int, num_out: int, with_bias: bool) -> None:
    randn, num_in = normals(num_out, torch.float16), 2120
    x, weight = randn(num_rows, num_in), randn(num_out, num_in) / num_in**0.5
    bias = randn(num_out) if with_bias else None
    expected = linear_reference(
        x.float(), weight.float(), bias.float() if bias is not None else None
    )
    torch.testing.assert_close(linear(x, weight, bias).float(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("size", "with_norm", "dtype"),
    pairwise(
        [(33, 192), (5, 288), (5, 512), (20, 768)], [False, True], [torch.float32, torch.float16]
    ),
)
def test_a_product_is_added_to_the_residual_and_normalised(
    size: tuple[int, int], with_norm: bool, dtype: torch.dtype
) -> None:
    num_rows, num_in = size
    randn = normals(num_rows, dtype)
    x, residual = randn(num_rows, num_in + 8)[:, :num_in], randn(num_rows, 70)
    weight = randn(70, num_in) / num_in**0.5
    norm = Norm(randn(70), 1e-5) if with_norm else None
    expected = (residual.float() + x.float() @ weight.float().t()).to(dtype)
    normed = add_linear(residual, x, weight, norm=norm)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(residual, expected, rtol=tolerance, atol=tolerance)
    assert (normed is not None) == with_norm
    if normed is not None and norm is not None:
        expected = rms_norm_reference(residual.float(), Norm(norm.weight.float(), norm.eps))
        torch.testing.assert_close(normed, expected.to(dtype), rtol=tolerance, atol=tolerance)


def test_some_rows_are_normalised_into_a_part_of_a_row() -> None:
    randn = normals(5)
    x, norm, rows = randn(9, 80), Norm(randn(80), 1e-5), torch.tensor([4, 0, 4], device=DEVICE)
    out = randn(3, 200)
    before = out.clone()
    normed = rms_norm(x, norm, rows, out[:, 100:180])
    torch.testing.assert_close(normed, rms_norm_reference(x[rows], norm))
    assert torch.equal(out[:, 100:180], normed)
    assert torch.equal(out[:, :100], before[:, :100])
    assert torch.equal(out[:, 180:], before[:, 180:])

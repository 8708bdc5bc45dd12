"""Products with matrices of 4 and 8 bits against the plain matrices that they stand for."""

from functools import partial
from typing import Any

import pytest
import torch
from grids import pairwise
from products import (
    ALL,
    FUSED,
    NUM_ROWS,
    SIZES,
    Fused,
    NumberFormat,
    check_rows_keep_bits,
    inputs_of,
    narrow_of,
)
from random_tensors import normals
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model import narrow_linear as module
from outrider.kernels.model.linear import linear_reference
from outrider.kernels.model.narrow_linear import add_narrow_linear, narrow_linear
from outrider.kernels.model.narrow_matrix import (
    columns_of,
    dequantise,
    narrow_matrix,
    reordered_rows,
    round_to_fp8,
    rows_of,
    stack,
)
from outrider.kernels.model.rms_norm import Norm, rms_norm_reference

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
FORMATS: list[NumberFormat] = [
    ("fp8", ALL, 1, False),
    ("fp8", ALL, ALL, False),
    ("fp8", 128, 128, False),
    ("int8", ALL, 1, False),
    ("int8", 32, 1, True),
    ("int4", 32, 1, True),
    ("int4", 64, 1, False),
    ("int4", 128, 1, False),
    ("int4", 256, 1, True),
    ("int4", ALL, 1, True),
    ("fp4", 32, 1, False),
    ("nvfp4", 16, 1, False),
]


CASES = pairwise(FORMATS, FUSED, NUM_ROWS, SIZES)
if DEVICE.type == "cuda":
    CASES = [case for case in CASES if not case.marks]  # compiling all takes ten minutes


@needs_kernels
@pytest.mark.parametrize(("format_", "fused", "num_rows", "size"), CASES)
def test_kernel_equals_the_plain_product(
    format_: NumberFormat, fused: Fused, num_rows: int, size: tuple[int, int]
) -> None:
    num_in, num_out = size
    if format_[1] not in (ALL,) and num_in % format_[1] and format_[0] != "fp8":
        num_in = -(-num_in // format_[1]) * format_[1]
    matrix = narrow_of(format_, fused.num_outputs(num_out), num_in)
    x, bias, norm, residual = inputs_of(fused, num_rows, num_in, num_out)
    plain = dequantise(matrix, torch.float64)
    wide = bias.double() if bias is not None else None
    if not fused.residual:
        x_norm = Norm(norm.weight.double(), norm.eps) if norm is not None else None
        expected = linear_reference(x.double(), plain, wide, norm=x_norm, gated=fused.gated)
        out = narrow_linear(x, matrix, bias, norm=norm, gated=fused.gated)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=5e-4)
        return
    expected = residual.double() + linear_reference(x.double(), plain, wide)
    normed = add_narrow_linear(residual, x, matrix, bias, norm=norm)
    torch.testing.assert_close(residual.double(), expected, rtol=1e-4, atol=1e-4)
    if normed is not None:
        assert norm is not None
        expected = rms_norm_reference(expected, Norm(norm.weight.double(), norm.eps))
        torch.testing.assert_close(normed.double(), expected, rtol=1e-4, atol=1e-4)
    else:
        assert norm is None or fused.bias or num_rows == 300


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter's products are numpy's")
@pytest.mark.parametrize("format_", [FORMATS[0], FORMATS[2], FORMATS[5]])
def test_a_row_comes_out_the_same_in_any_company(
    format_: NumberFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_num_splits", lambda matrix, gated=False: 2)
    monkeypatch.setattr(module, "MAX_SPLIT_ROWS", 20)  # beyond it a program has all splits
    check_rows_keep_bits(
        partial(narrow_linear, batch_invariant=True),
        partial(add_narrow_linear, batch_invariant=True),
        narrow_of(format_, 96, 1024),
        140,
        [(0, 1), (3, 20), (7, 40), (70, 130)],
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter runs no machine code")
@pytest.mark.parametrize("num_rows", [3, 40, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format_", [format_ for format_ in FORMATS if format_[2] != ALL])
def test_weights_are_exact_in_16_bits(
    format_: NumberFormat, dtype: torch.dtype, num_rows: int
) -> None:
    matrix = narrow_of(format_, 80, 512)
    x = normals(dtype=dtype)(num_rows, 512)
    expected = x.double() @ dequantise(matrix, torch.float64).t()
    got = narrow_linear(x, matrix, batch_invariant=True).double()
    assert (got - expected).norm() < torch.finfo(dtype).eps * expected.norm()


@needs_kernels
def test_inputs_may_be_in_another_order() -> None:
    matrix = narrow_of(("int4", 32, 1, True), 48, 128)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ordered = matrix._replace(order=order)
    x = normals()(5, 128)
    expected = narrow_linear(x[:, order], matrix)
    assert torch.equal(narrow_linear(x, ordered), expected)
    plain = dequantise(ordered, torch.float32)
    torch.testing.assert_close(x @ plain.t(), expected, rtol=1e-4, atol=1e-4)
    many = x.repeat(60, 1)  # through the library
    expected = expected.repeat(60, 1)
    torch.testing.assert_close(narrow_linear(many, ordered), expected, rtol=1e-4, atol=1e-4)


# Of the second, the first matrix ends in the midst of outputs that share a scale.
@pytest.mark.parametrize("sizes", [(128, 48, 16), (192, 128)])
def test_matrices_of_one_form_are_stacked(sizes: tuple[int, ...]) -> None:
    for format_ in FORMATS:
        parts = [narrow_of(format_, num_out, 256) for num_out in sizes]
        stacked = stack(parts)
        assert stacked is not None
        expected = torch.cat([dequantise(part, torch.float32) for part in parts])
        assert torch.equal(dequantise(stacked, torch.float32), expected)


@pytest.mark.parametrize(
    "other", [("int8", 64, 1, False), ("int4", 128, 1, False), ("int4", 64, 1, True)]
)
def test_matrices_of_several_forms_are_not_stacked(other: NumberFormat) -> None:
    first = narrow_of(("int4", 64, 1, False), 32, 256)
    assert stack([first, narrow_of(other, 32, 256)]) is None
    order = torch.arange(256, device=DEVICE).flip(0)
    assert stack([first, first._replace(order=order)]) is None
    assert stack([first._replace(order=order), first._replace(order=order.clone())]) is not None


@pytest.mark.parametrize("format_", FORMATS)
def test_ranges_of_outputs_and_inputs_stand_for_those_of_the_plain_matrix(
    format_: NumberFormat,
) -> None:
    """Of outputs also in the midst of a block, of inputs between groups."""
    matrix = narrow_of(format_, 384, 768)
    plain = dequantise(matrix, torch.float32)
    for first, count in ((0, 192), (192, 192), (128, 256)):
        got = dequantise(rows_of(matrix, first, count), torch.float32)
        assert torch.equal(got, plain[first : first + count])
    step = 256 if matrix.group == 256 else 128
    for first, count in ((0, step), (step, 2 * step), (768 - step, step)):
        part = columns_of(matrix, first, count)
        assert part.kind == matrix.kind
        got = dequantise(part, torch.float32)
        assert torch.equal(got, plain[:, first : first + count])


@pytest.mark.parametrize("format_", FORMATS)
def test_outputs_in_another_order_are_those_of_the_plain_matrix(format_: NumberFormat) -> None:
    """Also if outputs that share a scale do not stay together."""
    matrix = narrow_of(format_, 320, 256)
    plain = dequantise(matrix, torch.float32)
    first, second, last = torch.arange(320, device=DEVICE).split(128)
    moved = torch.cat((second, first, last))
    turned = torch.cat((first, second.flip(0).roll(1), last))  # blocks begin with their own first
    shifted = torch.arange(320, device=DEVICE).roll(-192)  # 192 to 319, then from 0 on
    for order in (moved, turned, shifted):
        got = reordered_rows(matrix, order)
        assert torch.equal(dequantise(got, torch.float32), plain[order])
        assert got.rows == (128 if order is moved and matrix.rows == 128 else 1)


def test_ranges_of_inputs_that_cut_a_scale_are_refused() -> None:
    matrix = narrow_of(("int4", 64, 1, False), 32, 256)
    with pytest.raises(ValueError, match="64 inputs share a scale, which 96 inputs would cut"):
        columns_of(matrix, 0, 96)
    order = torch.arange(256, device=DEVICE).flip(0)
    with pytest.raises(ValueError, match="an order of their own"):
        columns_of(matrix._replace(order=order), 0, 128)


def test_a_plain_matrix_is_rounded_to_the_nearest() -> None:
    weight = normals()(70, 200)
    weight[3] = 0
    matrix = round_to_fp8(weight)
    got = dequantise(matrix, torch.float32)
    step = weight.abs().amax(1, keepdim=True) / 448 / 2**9  # of the smallest numbers
    assert ((got - weight).abs() <= weight.abs() / 16 + step + 1e-12).all()
    assert matrix.num_bytes == 70 * 256 + 70 * 4  # rows are whole chunks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group": 48}, "48 inputs share a scale"),
        ({"group": 32}, r"scales have the shape \(3, 16\), not \(6, 16\)"),
        ({"zero": torch.zeros(2, 16, dtype=torch.int8)}, r"zero points have the shape \(2, 16\)"),
    ],
)
def test_what_is_no_matrix_is_refused(changes: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"group": 64, **changes}
    with pytest.raises(ValueError, match=reason):
        narrow_matrix("int8", torch.zeros(16, 192, dtype=torch.int8), torch.ones(3, 16), **given)

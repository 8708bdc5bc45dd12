"""Products with matrices of 4 and 8 bits against the plain matrices that they stand for."""

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from grids import pairwise
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model import narrow_linear as module
from outrider.kernels.model.linear import linear_reference
from outrider.kernels.model.narrow_linear import add_narrow_linear, narrow_linear
from outrider.kernels.model.narrow_matrix import (
    Kind,
    NarrowMatrix,
    dequantise,
    narrow_matrix,
    round_to_fp8,
    stack,
)
from outrider.kernels.model.rms_norm import Norm, rms_norm_reference

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
ALL = 1 << 20  # inputs: one scale for all of an output's
# Kind, group, outputs of a scale, whether there are zero points.
FORMATS: list[tuple[Kind, int, int, bool]] = [
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
]
_seeds = count()


def make(
    format_: tuple[Kind, int, int, bool], num_out: int, num_in: int, device: torch.device
) -> NarrowMatrix:
    kind, group, rows, has_zero = format_
    generator = torch.Generator().manual_seed(next(_seeds))

    def codes_below(end: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=generator, dtype=torch.uint8)

    group, rows = min(group, num_in), min(rows, num_out)
    shape = (-(-num_in // group), -(-num_out // rows))
    codes = codes_below(16 if kind in ("int4", "fp4") else 256, num_out, num_in)
    if kind == "fp8":
        codes[codes % 128 == 127] = 126  # not a number
        codes = codes.view(torch.float8_e4m3fn)
    elif kind == "int8":
        codes = codes.view(torch.int8)
    zero = None
    if has_zero:
        zero = codes_below(16, shape[0], num_out).to(torch.int8).to(device)
    scale = torch.rand(*shape, generator=generator) / 100 + 0.001
    return narrow_matrix(
        kind, codes.to(device), scale.to(device), group=group, rows=rows, zero=zero
    )


def randn(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(next(_seeds))).to(device)


CASES = pairwise(
    FORMATS,
    [
        (False, False, False, False),
        (True, True, False, False),
        (True, False, False, True),
        (False, True, False, True),
        (False, False, True, False),
        (True, False, True, False),
        (True, False, True, True),
    ],
    [1, 2, 17, 70, 300],
    [(256, 80), (544, 48), (1024, 40)],
)
if DEVICE.type == "cuda":
    CASES = [case for case in CASES if not case.marks]  # compiling all takes ten minutes


@needs_kernels
@pytest.mark.parametrize(("format_", "fused", "num_rows", "size"), CASES)
def test_kernel_equals_the_plain_product(
    format_: tuple[Kind, int, int, bool],
    fused: tuple[bool, bool, bool, bool],
    num_rows: int,
    size: tuple[int, int],
    device: torch.device,
) -> None:
    with_norm, gated, with_residual, with_bias = fused
    num_in, num_out = size
    if format_[1] not in (ALL,) and num_in % format_[1] and format_[0] != "fp8":
        num_in = -(-num_in // format_[1]) * format_[1]
    num_weight_rows = 2 * num_out if gated else num_out
    matrix = make(format_, num_weight_rows, num_in, device)
    x = randn(num_rows, num_in + 3, device=device)[:, :num_in]  # rows need not follow each other
    bias = randn(num_weight_rows, device=device) if with_bias else None
    width = num_out if with_residual else num_in
    norm = Norm(randn(width, device=device), 1e-5) if with_norm else None
    residual = randn(num_rows, num_out, device=device)
    plain = dequantise(matrix, torch.float64)
    wide = bias.double() if bias is not None else None
    if not with_residual:
        x_norm = Norm(norm.weight.double(), norm.eps) if norm is not None else None
        expected = linear_reference(x.double(), plain, wide, norm=x_norm, gated=gated)
        out = narrow_linear(x, matrix, bias, norm=norm, gated=gated)
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
        assert norm is None or with_bias or num_rows == 300


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter's products are numpy's")
@pytest.mark.parametrize("format_", [FORMATS[0], FORMATS[2], FORMATS[5]])
def test_a_row_comes_out_the_same_in_any_company(
    format_: tuple[Kind, int, int, bool], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_num_splits", lambda matrix, gated=False: 2)
    monkeypatch.setattr(module, "_MAX_SPLIT_ROWS", 20)  # beyond it a program has all splits
    matrix = make(format_, 96, 1024, device)
    x, bias = randn(140, 1024, device=device).bfloat16(), randn(96, device=device).bfloat16()
    residual = randn(140, 96, device=device).bfloat16()
    narrow = partial(narrow_linear, same_bits=True)
    outs, sums = narrow(x, matrix, bias), residual.clone()
    gates = narrow(x, matrix, gated=True)
    add_narrow_linear(sums, x, matrix, same_bits=True)
    for first, last in ((0, 1), (3, 20), (7, 40), (70, 130)):
        some = slice(first, last)
        assert torch.equal(narrow(x[some], matrix, bias), outs[some])
        assert torch.equal(narrow(x[some], matrix, gated=True), gates[some])
        added = residual[some].clone()
        add_narrow_linear(added, x[some], matrix, same_bits=True)
        assert torch.equal(added, sums[some])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter runs no machine code")
@pytest.mark.parametrize("num_rows", [3, 40, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format_", [format_ for format_ in FORMATS if format_[2] != ALL])
def test_weights_are_exact_in_16_bits(
    format_: tuple[Kind, int, int, bool], dtype: torch.dtype, num_rows: int, device: torch.device
) -> None:
    matrix = make(format_, 80, 512, device)
    x = randn(num_rows, 512, device=device).to(dtype)
    expected = x.double() @ dequantise(matrix, torch.float64).t()
    got = narrow_linear(x, matrix, same_bits=True).double()
    assert (got - expected).norm() < torch.finfo(dtype).eps * expected.norm()


@needs_kernels
def test_inputs_may_be_in_another_order(device: torch.device) -> None:
    matrix = make(("int4", 32, 1, True), 48, 128, device)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0)).to(device)
    ordered = matrix._replace(order=order)
    x = randn(5, 128, device=device)
    expected = narrow_linear(x[:, order], matrix)
    assert torch.equal(narrow_linear(x, ordered), expected)
    plain = dequantise(ordered, torch.float32)
    torch.testing.assert_close(x @ plain.t(), expected, rtol=1e-4, atol=1e-4)
    many = x.repeat(60, 1)  # through the library
    expected = expected.repeat(60, 1)
    torch.testing.assert_close(narrow_linear(many, ordered), expected, rtol=1e-4, atol=1e-4)


# Of the second, the first matrix ends in the midst of outputs that share a scale.
@pytest.mark.parametrize("sizes", [(128, 48, 16), (192, 128)])
def test_matrices_of_one_form_are_stacked(sizes: tuple[int, ...], device: torch.device) -> None:
    for format_ in FORMATS:
        parts = [make(format_, num_out, 256, device) for num_out in sizes]
        stacked = stack(parts)
        assert stacked is not None
        expected = torch.cat([dequantise(part, torch.float32) for part in parts])
        assert torch.equal(dequantise(stacked, torch.float32), expected)


@pytest.mark.parametrize(
    "other", [("int8", 64, 1, False), ("int4", 128, 1, False), ("int4", 64, 1, True)]
)
def test_matrices_of_several_forms_are_not_stacked(
    other: tuple[Kind, int, int, bool], device: torch.device
) -> None:
    first = make(("int4", 64, 1, False), 32, 256, device)
    assert stack([first, make(other, 32, 256, device)]) is None
    order = torch.arange(256, device=device).flip(0)
    assert stack([first, first._replace(order=order)]) is None
    assert stack([first._replace(order=order), first._replace(order=order.clone())]) is not None


def test_a_plain_matrix_is_rounded_to_the_nearest(device: torch.device) -> None:
    weight = randn(70, 200, device=device)
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

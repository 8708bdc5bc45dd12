"""Products of rounded rows with matrices of 8 bits against the numbers that the codes stand for."""

import os
import signal
import time
import traceback

import pytest
import torch
from grids import pairwise
from products import ALL, FUSED, NUM_ROWS, SIZES, Fused, check_rows_keep_bits, inputs_of
from random_tensors import normals
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model import block_scaled_product, row_codes, scaled_product, tiles
from outrider.kernels.model import scaled_linear as module
from outrider.kernels.model.fp8 import as_bytes
from outrider.kernels.model.gated_norm import gated_norm
from outrider.kernels.model.linear import linear_reference
from outrider.kernels.model.narrow_matrix import (
    Kind,
    NarrowMatrix,
    RowFormat,
    dequantise,
    narrow_matrix,
)
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.row_codes import (
    RowCodes,
    Rows,
    plain,
    round_rows,
    round_rows_reference,
    rounded_rows,
)
from outrider.kernels.model.scaled_linear import (
    add_scaled_linear,
    scaled_linear,
    scaled_linear_reference,
)
from outrider.kernels.model.scaled_product import parts_of
from outrider.kernels.model.sigmoid_gate import gate_heads
from outrider.kernels.model.split_product import PeerParts, add_parts
from outrider.kernels.triton_or_none import HAS_GLUON

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
# Kind, group, outputs of a scale.
FORMATS: list[tuple[Kind, int, int]] = [
    ("fp8", ALL, 1),
    ("fp8", ALL, ALL),
    ("fp8", 128, 128),
    ("int8", ALL, 1),
    ("int8", 256, 1),
]
# Tensor cores add products of e4m3 with 14 bits.
_MAX_ERROR = 5e-3 if DEVICE.type == "cuda" else 2e-4


def make(format_: tuple[Kind, int, int], num_out: int, num_in: int) -> NarrowMatrix:
    kind, group, rows = format_
    randn = normals(num_out)
    group, rows = min(group, num_in), min(rows, num_out)
    plain = randn(num_out, num_in).clamp(-4, 4)
    if kind == "fp8":
        codes = (plain * 80).to(torch.float8_e4m3fn)
    else:
        codes = (plain * 30).round().to(torch.int8)
    scale = randn(-(-num_in // group), -(-num_out // rows)).abs() / 1000 + 1e-4
    return narrow_matrix(kind, codes, scale, group=group, rows=rows, rounds_inputs=True)


def format_of(matrix: NarrowMatrix) -> RowFormat:
    assert matrix.row_format is not None
    return matrix.row_format


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_are_rounded_to_the_nearest(format_: tuple[Kind, int, int]) -> None:
    matrix = make(format_, 16, 300)
    x = normals()(7, 300) * torch.logspace(-3, 3, 7, device=DEVICE)[:, None]
    x[4] = 0
    got = rounded_rows(x, format_of(matrix))
    largest = torch.cat([part.abs().amax(1, keepdim=True) for part in x.split(matrix.group, 1)], 1)
    whole = largest.repeat_interleave(matrix.group, 1)[:, :300]
    error = (got - x).abs()
    if matrix.kind == "fp8":
        assert (error <= x.abs() / 16 + whole / 448 / 2**9 + 1e-12).all()
    else:
        assert (error <= whole / 127 / 1.99 + 1e-12).all()


@needs_kernels
def test_programs_that_share_a_row_round_it_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    format_ = format_of(make(("fp8", 128, 128), 16, 700))
    x = normals(dtype=torch.bfloat16)(5, 700)
    x[2, 600] = torch.nan
    expected = round_rows(x, format_)
    monkeypatch.setattr(row_codes, "_AT_ONCE", 256)
    got = round_rows(x, format_)
    assert torch.equal(as_bytes(got.codes), as_bytes(expected.codes))
    assert torch.equal(got.scale.view(torch.int32), expected.scale.view(torch.int32))


@needs_kernels
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("num_in", [16, 300, 512])
def test_the_kernel_rounds_as_the_reference(format_: tuple[Kind, int, int], num_in: int) -> None:
    matrix = make(format_, 16, num_in)
    randn = normals(dtype=torch.bfloat16)
    x = (randn(7, num_in + 3) * 30)[:, :num_in]
    x[4] = 0
    norm = Norm(randn(num_in), 1e-5)
    for rows, expected in (
        (round_rows(x, format_of(matrix)), round_rows_reference(x, format_of(matrix))),
        (
            round_rows(x, format_of(matrix), norm),
            round_rows_reference(rms_norm(x, norm), format_of(matrix)),
        ),
    ):
        assert torch.equal(rows.scale, expected.scale)
        assert torch.equal(rows.codes.float(), expected.codes.float())


@needs_kernels
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_rounding_lets_nan_through(format_: tuple[Kind, int, int], nan: float) -> None:
    matrix = make(format_, 16, 300)
    x = normals()(7, 300)
    x[4, 260] = nan
    rows, expected = round_rows(x, format_of(matrix)), round_rows_reference(x, format_of(matrix))
    assert torch.equal(rows.scale.isnan(), expected.scale.isnan())
    out = scaled_linear(rows, matrix)
    assert out.isnan().all(1).tolist() == out.isnan().any(1).tolist() == [i == 4 for i in range(7)]


@needs_kernels
@pytest.mark.parametrize(
    ("format_", "fused", "num_rows", "size"), pairwise(FORMATS, FUSED, NUM_ROWS, SIZES)
)
def test_kernel_equals_the_plain_product(
    format_: tuple[Kind, int, int], fused: Fused, num_rows: int, size: tuple[int, int]
) -> None:
    num_in, num_out = size
    matrix = make(format_, fused.num_outputs(num_out), num_in)
    x, bias, norm, residual = inputs_of(fused, num_rows, num_in, num_out)
    plain = dequantise(matrix, torch.float64)
    wide = bias.double() if bias is not None else None
    if not fused.residual:
        given = x if norm is None else rms_norm(x, norm)
        rows = rounded_rows(given, format_of(matrix)).double()
        expected = linear_reference(rows, plain, wide, gated=fused.gated)
        got = scaled_linear(x, matrix, bias, norm=norm, gated=fused.gated)
        assert (got - expected).norm() < _MAX_ERROR * expected.norm()
        return
    expected = residual.double() + linear_reference(
        rounded_rows(x, format_of(matrix)).double(), plain, wide
    )
    normed = add_scaled_linear(residual, x, matrix, bias, norm=norm)
    assert (residual - expected).norm() < _MAX_ERROR * expected.norm()
    if normed is not None:
        assert norm is not None
        torch.testing.assert_close(normed, rms_norm(residual, norm))


def test_the_reference_rounds_inputs() -> None:
    matrix = make(FORMATS[0], 24, 96)
    x = normals()(5, 96)
    norm = Norm(torch.full((96,), 2.0, device=DEVICE), 1e-6)
    got = scaled_linear_reference(x, matrix, norm=norm)
    exact = linear_reference(x, dequantise(matrix, x.dtype), norm=norm)
    assert 1e-3 < (got - exact).norm() / exact.norm() < 0.1


# The interpreter's products of fp8 are numpy's, and those of int8 take it seconds.
IN_COMPANY = FORMATS if DEVICE.type == "cuda" else FORMATS[3:4]


@needs_kernels
@pytest.mark.parametrize("format_", IN_COMPANY)
def test_a_row_comes_out_the_same_in_any_company(
    format_: tuple[Kind, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "parts_of", lambda matrix: 2)
    monkeypatch.setattr(scaled_product, "MAX_SPLIT_ROWS", 20)  # beyond it a program has all splits
    monkeypatch.setattr(scaled_product, "_AHEAD", 256)
    check_rows_keep_bits(
        scaled_linear,
        add_scaled_linear,
        make(format_, 96, 1024),
        300,
        [(0, 1), (3, 20), (7, 40), (70, 130), (0, 257)],
    )


@needs_kernels
@pytest.mark.parametrize("format_", FORMATS)
def test_adding_parts_may_round_the_norm_of_the_sum(format_: tuple[Kind, int, int]) -> None:
    row_format = format_of(make(format_, 16, 300))
    randn = normals(dtype=torch.bfloat16)
    residual, norm, parts = randn(9, 300), Norm(randn(300), 1e-5), normals(1)(3, 9, 300)
    same = residual.clone()
    normed = add_parts(same, parts, norm)
    assert isinstance(normed, torch.Tensor)
    expected = round_rows(normed, row_format)
    got = add_parts(residual, parts, norm._replace(rounds=row_format))
    assert isinstance(got, RowCodes)
    assert torch.equal(residual, same)
    check_codes(got, expected)
    matrix = make(format_, 48, 300)
    assert torch.equal(scaled_linear(got, matrix), scaled_linear(normed, matrix))


@needs_kernels
@pytest.mark.parametrize("format_", FORMATS)
def test_a_norm_that_rounds_also_keeps_its_rows_if_that_is_wanted(
    format_: tuple[Kind, int, int],
) -> None:
    row_format = format_of(make(format_, 16, 300))._replace(keeps_rows=True)
    randn = normals(dtype=torch.bfloat16)
    residual, norm, parts = randn(9, 300), Norm(randn(300), 1e-5), normals(1)(3, 9, 300)
    behind_sum = add_parts(residual, parts, norm._replace(rounds=row_format))
    expected = rms_norm(residual, norm)
    for rows in (behind_sum, round_rows(residual, row_format, norm)):
        assert isinstance(rows, RowCodes)
        assert torch.equal(plain(rows), expected)
        check_codes(rows, round_rows(expected, row_format))
    assert plain(round_rows(residual, row_format)) is residual


# Heads and their width: of several programs, of half of one, and those that have no whole groups.
@needs_kernels
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(("num_heads", "dim"), [(18, 128), (4, 128), (9, 256), (3, 12), (5, 384)])
def test_gates_round_what_they_store_otherwise(
    num_heads: int, dim: int, format_: tuple[Kind, int, int]
) -> None:
    row_format = format_of(make(format_, 16, num_heads * dim))
    randn = normals(dtype=torch.bfloat16)
    x, gate = randn(5, num_heads, dim), randn(5, num_heads, 2 * dim)
    x[3] = 0
    norm = Norm(normals(7)(dim), 1e-6)
    z = gate[..., :dim].flatten(1)
    expected = gated_norm(x, norm, z)
    assert isinstance(expected, torch.Tensor)
    got = gated_norm(x, norm._replace(rounds=row_format), z)
    check_codes(got, round_rows(expected, row_format))
    multiplied = gate_heads(x.clone(), gate[..., dim:])
    assert isinstance(multiplied, torch.Tensor)
    got = gate_heads(x, gate[..., dim:], row_format)
    check_codes(got, round_rows(multiplied, row_format))


@needs_kernels
@pytest.mark.parametrize("group", [128, 8192])
def test_wide_rows_are_rounded_in_parts_of_whole_groups(group: int) -> None:
    x = normals()(3, 16384)
    row_format = RowFormat(torch.float8_e4m3fn, group, 16384 // group, 16384)
    check_codes(round_rows(x, row_format), round_rows_reference(x, row_format))


def check_codes(got: Rows, expected: RowCodes) -> None:
    assert isinstance(got, RowCodes)
    assert got.dtype == expected.dtype
    assert torch.equal(got.scale, expected.scale)
    assert torch.equal(got.codes.float(), expected.codes.float())


@needs_kernels
def test_parts_are_added_where_they_lie_once_their_ranks_have_come() -> None:
    """Rank 1 of three meets the others for the fifth time; they are there already."""
    randn = normals(dtype=torch.bfloat16)
    residual, norm, parts = randn(5, 304), Norm(randn(304), 1e-5), [randn(5, 304) for _ in range(3)]
    same = residual.clone()
    addresses = torch.tensor([part.data_ptr() for part in parts], device=DEVICE)
    meetings = torch.full((8,), 4, dtype=torch.int32, device=DEVICE)
    flags = torch.full((3, 3, 8), 5, dtype=torch.int32, device=DEVICE)  # of each rank: by whom
    flags[:, 1] = 4
    flags_at = torch.tensor([each.data_ptr() for each in flags], device=DEVICE)
    expected = add_parts(same, torch.stack(parts), norm)
    got = add_parts(residual, PeerParts(addresses, flags_at, meetings, 1), norm)
    assert torch.equal(residual, same)
    assert meetings.tolist() == [5] * 5 + [4] * 3
    assert torch.equal(flags[::2, 1], meetings.expand(2, 8))
    assert (flags[:, ::2] == 5).all()
    assert isinstance(got, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(got, expected)


@needs_kernels
@pytest.mark.skipif(DEVICE.type == "cuda", reason="forks this process")
def test_ranks_that_come_late_in_turn_add_the_same_parts() -> None:
    """Who is ahead writes its next part to the other place, and waits with the one after it.

    On the way the counts of their meetings wrap.
    """
    first = 2**31 - 10
    num_sums, num_rows, width = 24, 2, 32
    places = torch.zeros(2, 2, num_rows, width).share_memory_()  # by turn and rank
    flags = torch.full((2, 2, 8), first, dtype=torch.int32).share_memory_()
    sums = torch.zeros(2, num_rows, width).share_memory_()
    flags_at = torch.tensor([each.data_ptr() for each in flags])
    numbers = torch.arange(float(num_rows * width)).view(num_rows, width)

    def add_all(rank: int) -> None:
        signal.alarm(60)  # ends it if the other does not come
        meetings = torch.full((8,), first, dtype=torch.int32)
        for i in range(num_sums):
            time.sleep(0.02 * ((i // 3 + rank) % 3 == 0))
            places[i % 2, rank] = numbers * (i + 1) + rank
            addresses = torch.tensor([part.data_ptr() for part in places[i % 2]])
            add_parts(sums[rank], PeerParts(addresses, flags_at, meetings, rank), None)

    pid = os.fork()
    if pid == 0:
        try:
            add_all(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    try:
        add_all(0)
        assert os.waitpid(pid, 0)[1] == 0
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        signal.alarm(0)
    expected = sum(2 * numbers * (i + 1) + 1 for i in range(num_sums))
    assert torch.equal(sums, torch.stack([expected] * 2))


@needs_kernels
def test_a_trial_does_not_wait_for_ever_for_a_rank_that_does_not_come() -> None:
    residual = torch.zeros(1, 64, device=DEVICE)
    part = torch.ones(1, 64, device=DEVICE)
    addresses = torch.tensor([part.data_ptr()] * 2, device=DEVICE)
    meetings = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    flags = torch.zeros(2, 2, 8, dtype=torch.int32, device=DEVICE)
    flags_at = torch.tensor([each.data_ptr() for each in flags], device=DEVICE)
    add_parts(residual, PeerParts(addresses, flags_at, meetings, 1, most_tries=5), None)
    assert flags[:, :, 0].tolist() == [[0, 1], [0, 0]]  # rank 1 has, and rank 0 has not


@needs_kernels
@pytest.mark.parametrize("format_", FORMATS)
# Only a GPU divides by 5,000 inexactly, and there all tests run.
@pytest.mark.parametrize("width", [300, pytest.param(5000, marks=pytest.mark.sweep)])
def test_a_norm_rounds_alike_behind_a_sum_and_before_a_product(
    format_: tuple[Kind, int, int], width: int
) -> None:
    row_format = format_of(make(format_, 16, width))
    num_rows = 512 if DEVICE.type == "cuda" else 64  # the interpreter runs them one by one
    randn = normals(dtype=torch.bfloat16)  # in float32 a thread has fewer numbers at a time
    residual, norm = randn(num_rows, width), Norm(randn(width), 1e-5)
    parts = normals(1)(1, num_rows, width)
    got = add_parts(residual, parts, norm._replace(rounds=row_format))
    check_codes(got, round_rows(residual, row_format, norm))


def test_splits_are_whole_blocks() -> None:
    for num_in in (96, 512, 1024, 1536):
        matrix = make(FORMATS[0], 32, num_in)
        splits = parts_of(matrix)
        assert splits == 1 or matrix.codes.shape[1] % (128 * splits) == 0


@pytest.mark.parametrize(
    ("num_out", "num_in", "splits"),
    [
        (5120, 17408, 4),  # Qwen3.6-27B
        (5120, 6144, 4),
        (2048, 4096, 8),  # Qwen3.6-35B-A3B
        (2048, 512, 2),
        (4096, 12288, 4),  # Qwen3-8B
        (16384, 5120, 1),
    ],
)
def test_parts_keep_an_h200_busy(
    num_out: int, num_in: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "num_programs", lambda device, per_sm: per_sm * 132)
    codes = torch.empty(num_out, num_in, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(num_in // 128, num_out // 128, device="meta")
    assert parts_of(narrow_matrix("fp8", codes, scale, group=128, rows=128)) == splits


@pytest.mark.parametrize("num_sms", [1, 78, 108, 132, 170])
def test_the_kernel_of_many_rows_takes_every_split(
    num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "num_programs", lambda device, per_sm: per_sm * num_sms)
    monkeypatch.setattr(block_scaled_product, "has_warpgroups", lambda device: HAS_GLUON)
    for num_in in (192, 512, 1152, 1280, 4352, 17408):
        for num_out in (40, 1024, 5120):
            codes = torch.empty(num_out, num_in, dtype=torch.float8_e4m3fn, device="meta")
            scale = torch.empty(-(-num_in // 128), -(-num_out // 128), device="meta")
            matrix = narrow_matrix("fp8", codes, scale, group=128, rows=128, rounds_inputs=True)
            takes = block_scaled_product.is_for(matrix, num_splits=parts_of(matrix))
            assert takes == (HAS_GLUON and num_in % 256 == 0)

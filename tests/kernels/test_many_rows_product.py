"""Products of many rows on Hopper GPUs that are gated, or added up, where they are computed.

On a CPU the kernel runs in plain torch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_scaled import MARKS, Broken, interpreted, on_gpu
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model import batch_invariant_linear as linear
from outrider.kernels.model import many_rows_product as module
from outrider.kernels.model.batch_invariant_linear import (
    LibraryRows,
    add_batch_invariant_linear,
    batch_invariant_linear,
    library_rows,
)
from outrider.kernels.model.many_rows_product import is_ahead, is_for, many_rows_product
from outrider.kernels.model.product import parts_of, product, product_parts
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.split_product import add_parts
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = MARKS

KERNEL = "_many_rows_kernel"


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small whole numbers, whose products are added without rounding in any order."""
    return normals(seed)(*shape).mul(2).round().clamp(-4, 4).to(dtype)


def expected_of(out: Tensor, x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    """What `many_rows_product` should store, if sums need no rounding."""
    y = x.float() @ weight.float().t()
    if not gated:
        return (out.float() + y).to(out.dtype)
    gate, up = y.to(out.dtype).float().chunk(2, 1)  # rounded first
    return (gate / (1 + torch.exp(-gate)) * up).to(out.dtype)


# Outputs that are no whole tiles, and tiles that programs have several of.
CASES = [
    pytest.param(200, 264, 192, 1, True, id="gated"),
    pytest.param(70, 40, 512, 1, True, id="gated, less than a tile"),
    pytest.param(300, 296, 256, 1, False, id="added"),
    pytest.param(150, 520, 512, 2, False, id="two shares"),
    pytest.param(200, 256, 1024, 4, False, id="four shares"),
    pytest.param(140, 264, 128, 2, False, id="two shares of a block each"),
]


@interpreted
@pytest.mark.parametrize(("num_rows", "num_out", "num_in", "num_splits", "gated"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_product_with_its_gate_or_sum(
    num_rows: int,
    num_out: int,
    num_in: int,
    num_splits: int,
    gated: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, KERNEL, Kernel(None, num_rows, KERNEL))
    x = whole(num_rows, num_in, dtype=dtype)
    weight = whole(2 * num_out if gated else num_out, num_in, seed=1, dtype=dtype)
    out = whole(num_rows, num_out, seed=2, dtype=dtype)
    if gated:
        weight = weight / 8  # so that gates are not all open or shut
    expected = expected_of(out, x, weight, gated=gated)
    many_rows_product(out, x, weight, gated=gated, num_splits=num_splits)
    assert torch.equal(out, expected)


@interpreted
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_splits", "gated"), [(1, True), (2, False)])
def test_any_order_of_warps_and_copies_gives_the_same(
    num_splits: int, gated: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tiles of so few blocks that one might be stored before that in front of it has been.
    x, weight = normals()(300, 128).bfloat16(), normals(1)(1024, 128).bfloat16()
    outs = []
    for each in (100, seed):
        monkeypatch.setattr(module, KERNEL, Kernel(1, each, KERNEL))
        outs.append(out := torch.zeros(300, 512 if gated else 1024, dtype=x.dtype))
        many_rows_product(out, x, weight, gated=gated, num_splits=num_splits)
    assert torch.equal(*outs)


@pytest.mark.parametrize("gated", [False, True])
def test_nan_stays_in_its_row(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As padding may have it."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, KERNEL, Kernel(2, name=KERNEL))
    x, weight = normals()(70, 512).bfloat16(), normals(1)(384, 512).bfloat16()
    x[5, 300] = torch.nan
    out = torch.zeros(70, 192 if gated else 384, dtype=x.dtype, device=DEVICE)
    many_rows_product(out, x, weight, gated=gated)
    is_nan = torch.arange(70, device=DEVICE)[:, None].expand_as(out) == 5
    assert torch.equal(out.isnan(), is_nan)


@on_gpu
@pytest.mark.parametrize("num_rows", [1, 130, 2100])
@pytest.mark.parametrize(
    ("num_out", "num_in", "gated"),
    [
        (3072, 2048, True),
        (264, 192, True),
        (4096, 4096, False),
        (5120, 8192, False),
        (1024, 3072, False),
        (272, 2048, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_have_the_bits_of_few(
    num_out: int, num_in: int, gated: bool, num_rows: int, dtype: torch.dtype
) -> None:
    x, residual = normals()(num_rows, num_in).to(dtype), normals(2)(num_rows, num_out).to(dtype)
    weight = (normals(1)(2 * num_out if gated else num_out, num_in) / num_in**0.5).to(dtype)
    num_splits = 1 if gated else parts_of(weight)
    assert is_for(weight, num_splits=num_splits)
    many = residual.clone()
    many_rows_product(many, x, weight, gated=gated, num_splits=num_splits)
    for first in range(0, num_rows, 150):
        rows = slice(first, first + 17)
        if gated:
            few = product(x[rows], weight, gated=True)
        else:
            few = residual[rows].clone()
            add_parts(few, product_parts(x[rows], weight, num_splits), None)
        assert torch.equal(few, many[rows]), first


@on_gpu
@pytest.mark.parametrize("shape", [(4096, 12288), (24576, 4096), (2048, 6144), (592, 2048)])
def test_it_works_here(shape: tuple[int, int]) -> None:
    assert library_rows(torch.empty(shape, dtype=torch.bfloat16, device=DEVICE), None).has_many


def test_it_is_for_weights_that_can_be_copied_and_whose_warps_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)

    def is_right(
        num_out: int, num_in: int, num_splits: int = 1, dtype: torch.dtype = torch.float16
    ) -> bool:
        return is_for(
            torch.empty(num_out, num_in, dtype=dtype, device="meta"), num_splits=num_splits
        )

    assert is_right(4096, 12288, 2)
    assert is_right(272, 192)
    assert not is_right(264, 192)  # halves of 132 outputs
    assert not is_right(272, 200)
    assert not is_right(272, 192, 2)

    assert not is_right(272, 192, dtype=torch.float32)


def test_it_is_ahead_where_programs_have_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_programs", lambda device, per_sm: 132 * per_sm)

    def is_right(num_rows: int, num_out: int) -> bool:
        x = torch.empty(num_rows, 64, dtype=torch.bfloat16)
        return is_ahead(x, torch.empty(num_out, 64, dtype=torch.bfloat16, device="meta"))

    assert is_right(1024, 4096)
    assert not is_right(512, 4096)  # half of the multiprocessors
    assert not is_right(1100, 4096)  # twelve programs have a second tile
    assert is_right(8192, 4096)
    assert is_right(1024, 24576)
    assert not is_right(17, 24576)
    x = torch.empty(1024, 65, dtype=torch.bfloat16)[:, :64]
    assert not is_ahead(x, torch.empty(4096, 64, device="meta"))  # rows that are not aligned
    x = torch.empty(1024 * 64 + 1, dtype=torch.bfloat16)[1:].view(1024, 64)
    assert not is_ahead(x, torch.empty(4096, 64, device="meta"))


@interpreted
@pytest.mark.parametrize("has_many", [False, True])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_it_is_taken_where_it_works_and_is_ahead(
    has_many: bool, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def multiply(out: Tensor, x: Tensor, weight: Tensor, **how: Any) -> None:
        taken.append(how)
        out.fill_(2)

    def own(x: Tensor, weight: Tensor, num_splits: int) -> Tensor:
        return torch.zeros(num_splits, len(x), len(weight))

    def add(*given: Any) -> None:
        given[-1].zero_()

    monkeypatch.setattr(linear, "is_ahead", lambda *_: is_ahead)
    monkeypatch.setattr(linear, "many_rows_product", multiply)
    monkeypatch.setattr(linear, "product", lambda *_, out, **__: out.zero_())
    monkeypatch.setattr(linear, "product_parts", own)
    monkeypatch.setattr(linear, "add_parts", add)
    x, weight = whole(40, 64), whole(64, 64)
    rows = LibraryRows((), (), has_many)
    gated = batch_invariant_linear(x, weight, None, rows, gated=True)
    batch_invariant_linear(x, weight, None, rows)  # the library's own is as good
    norm, residual = Norm(whole(64, seed=1) + 9, 1e-5), whole(40, 64)
    normed = add_batch_invariant_linear(residual, x, weight, None, rows, norm=norm)
    if not (has_many and is_ahead):
        assert not taken
        return
    assert taken == [{"gated": True}, {"num_splits": parts_of(weight)}]
    assert torch.equal(gated, torch.full((40, 32), 2.0).bfloat16())
    assert torch.equal(residual, torch.full((40, 64), 2.0).bfloat16())
    assert normed is not None
    assert torch.equal(normed, rms_norm(residual, norm))
    assert add_batch_invariant_linear(residual, x, weight, None, rows) is None


class Wrong:
    """Computes the last number a little differently."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(out: Tensor, *args: Any, **options: Any) -> None:
            Kernel(2, name=KERNEL)[grid](out, *args, **options)
            out[-1, -1] += 0.5

        return launch


@interpreted
@pytest.mark.parametrize(
    ("kernel", "dtype", "reason"),
    [
        pytest.param(None, torch.bfloat16, None, id="works"),
        pytest.param(None, torch.float16, None, id="works, and some results are infinite"),
        pytest.param(Broken, torch.bfloat16, "Cannot find ptxas)", id="broken"),
        pytest.param(Wrong, torch.bfloat16, "wrong", id="wrong"),
    ],
)
def test_what_fails_on_a_gpu_is_left_to_the_library_with_a_warning(
    kernel: Any,
    dtype: torch.dtype,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def gate(y: Tensor) -> Tensor:
        left, right = y.float().chunk(2, 1)
        return (left / (1 + torch.exp(-left)) * right).to(dtype)

    monkeypatch.setattr(linear, "silu_mul", gate)
    monkeypatch.setattr(module, KERNEL, kernel() if kernel else Kernel(2, name=KERNEL))
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    x, weight = whole(150, 256, dtype=dtype), whole(272, 256, seed=1, dtype=dtype)
    weight = weight * 2 if dtype == torch.float16 else weight / 8
    shares = zip(x.float().chunk(2, 1), weight.float().chunk(2, 1), strict=True)
    parts = torch.stack([a @ b.t() for a, b in shares])
    plain = parts.sum(0).to(dtype)
    assert gate(plain).isinf().any() == (dtype == torch.float16)
    assert linear._has_many(x, weight, plain, parts) == (kernel is None)
    assert len(caplog.records) == (reason is not None)
    assert all(str(reason) in record.getMessage() for record in caplog.records)

"""The products of some rows and of many in FP8 on Hopper GPUs, where rows and outputs have a scale
each.

On a CPU the kernels run in plain torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import block_scaled
import pytest
import torch
from block_scaled import Broken, exact, interpreted, on_gpu
from block_scaled import matrix_with_scales_of_outputs as make_matrix
from block_scaled import rows_with_one_scale as make_rows
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model import few_rows_codes, tiles
from outrider.kernels.model import row_scaled_few_rows as few_rows
from outrider.kernels.model import row_scaled_product as module
from outrider.kernels.model import scaled_product as products
from outrider.kernels.model import scaled_trial as trial
from outrider.kernels.model.narrow_matrix import NarrowMatrix
from outrider.kernels.model.row_codes import RowCodes
from outrider.kernels.model.scaled_product import parts_of, scaled_product
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS


SOME = [
    pytest.param(130, 40, 256, 1, False, False, 132, id="tails"),
    pytest.param(5, 200, 1024, 1, False, True, 1, id="few, with a bias"),
    pytest.param(200, 264, 768, 1, True, False, 2, id="gated"),
    pytest.param(160, 300, 1280, 1, True, True, 3, id="gated with a bias, in turn"),
    pytest.param(70, 192, 1280, 2, False, False, 132, id="two shares"),
    pytest.param(256, 128, 1024, 4, False, False, 3, id="four shares"),
    pytest.param(33, 192, 128, 1, True, False, 132, id="one block"),
]


@interpreted
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "num_splits", "gated", "has_bias", "num_sms"), SOME
)
def test_some_rows_are_multiplied_alike(
    num_rows: int,
    num_out: int,
    num_in: int,
    num_splits: int,
    gated: bool,
    has_bias: bool,
    num_sms: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "_row_scaled_few_rows_kernel"
    monkeypatch.setattr(few_rows_codes, "num_programs", lambda device, per_sm: per_sm * num_sms)
    monkeypatch.setattr(few_rows, name, Kernel(None, num_rows, name))
    x, randn = make_rows(num_rows, num_in, torch.bfloat16), normals(1)
    matrix = make_matrix(2 * num_out if gated else num_out, num_in)
    bias = randn(len(matrix.codes)).to(x.dtype) if has_bias else None
    expected = exact(x, matrix, bias, gated=gated)
    shape = (num_rows, num_out) if num_splits == 1 else (num_splits, num_rows, num_out)
    out = torch.full(shape, torch.nan, dtype=x.dtype if num_splits == 1 else torch.float32)
    last = 512 if num_in // num_splits > 512 else 0
    few_rows.row_scaled_few_rows(
        out, x, matrix, bias, num_splits=num_splits, last=last, gated=gated
    )
    found = out if num_splits == 1 else out.sum(0)
    assert (found - expected).norm() < 5e-3 * expected.norm()


@interpreted
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_warps_and_copies_of_some_rows_gives_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_row_scaled_few_rows_kernel"
    monkeypatch.setattr(few_rows_codes, "num_programs", lambda device, per_sm: per_sm)
    x, matrix = make_rows(150, 2560, torch.bfloat16), make_matrix(320, 2560)
    outs = []
    for each in (100, seed):
        monkeypatch.setattr(few_rows, name, Kernel(None, each, name))
        outs.append(out := torch.zeros(150, 160, dtype=torch.bfloat16))
        few_rows.row_scaled_few_rows(out, x, matrix, None, num_splits=1, last=512, gated=True)
    assert torch.equal(*outs)


@on_gpu
@pytest.mark.parametrize(("num_out", "num_in", "num_splits"), [(4096, 2048, 2), (520, 4096, 4)])
def test_parts_have_the_same_bits_among_some_rows_as_among_few(
    num_out: int, num_in: int, num_splits: int
) -> None:
    matrix, x = make_matrix(num_out, num_in), make_rows(256, num_in, torch.bfloat16)

    def parts(first: int, end: int) -> Tensor:
        rows = RowCodes(x.codes[first:end], x.scale[first:end], x.dtype)
        out = torch.empty(num_splits, end - first, num_out, device=DEVICE)
        scaled_product(out, rows, matrix, num_splits=num_splits)
        return out

    few = torch.cat([parts(first, first + 32) for first in range(0, 256, 32)], 1)
    for first, end in [(0, 33), (0, 64), (60, 156), (3, 131), (0, 160), (64, 255), (0, 256)]:
        assert torch.equal(parts(first, end), few[:, first:end])


@interpreted
@pytest.mark.parametrize("num_sms", [1, 78, 132])
def test_it_takes_every_split(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "num_programs", lambda device, per_sm: per_sm * num_sms)
    monkeypatch.setattr(module, "has_warpgroups", lambda device: True)
    for num_in in (200, 512, 1152, 4352, 17408):
        for num_out in (40, 1024, 4096, 5120):
            matrix = make_matrix(num_out, num_in)
            assert module.is_for(matrix, num_splits=parts_of(matrix))


def test_tiles_are_narrow_where_wide_ones_leave_more_programs_without_work() -> None:
    def outs(num_rows: int, num_out: int) -> int:
        return module._outs(num_rows, num_out, 132, 1, gated=False)

    assert outs(1000, 5120) == 128  # 160 tiles of 256
    assert outs(8192, 5120) == outs(4096, 5120) == 256
    assert outs(trial._MANY, trial._NUM_OUT) == 256
    assert outs(trial._MANY, trial._FEWER_OUT) == 128
    assert module._outs(1000, 5120, 132, 1, gated=True) == 256
    assert module._outs(8192, 4096, 132, 2, gated=False) == 128


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """Tries the kernel as on a Hopper GPU; whether it multiplies by a matrix then."""

    def multiply(
        out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Any = None, *, num_splits: int = 1,
        gated: bool = False, adds: bool = False,
    ) -> None:  # fmt: skip
        if out.ndim == 3 or (len(out) == trial._SOME and not adds):
            few_rows.row_scaled_few_rows(
                out, x, matrix, bias, num_splits=num_splits, last=0, gated=gated
            )
        else:
            module.row_scaled_product(
                out, x, matrix, bias, num_splits=num_splits, last=0, gated=gated, adds=adds
            )

    failed: set[torch.device] = set()
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(trial, "scaled_product", multiply)
    monkeypatch.setattr(trial, "_NUM_OUT", 512)
    monkeypatch.setattr(trial, "_FEWER_OUT", 256)
    monkeypatch.setattr(module, "failed", failed)

    def is_for(make: Callable[[int, int], NarrowMatrix] = make_matrix) -> bool:
        matrix = make(128, 256)
        trial.try_scaled_product(matrix, torch.bfloat16)
        return module.is_for(matrix)

    trial.try_rows.cache_clear()
    yield is_for
    trial.try_rows.cache_clear()


@interpreted
def test_a_kernel_that_works_is_used(
    tried: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(2, name="_row_scaled_kernel")
    some = Kernel(None, name="_row_scaled_few_rows_kernel")
    monkeypatch.setattr(module, "_row_scaled_kernel", kernel)
    monkeypatch.setattr(few_rows, "_row_scaled_few_rows_kernel", some)
    assert not tried(block_scaled.make_matrix)  # which it is not for: not tried
    assert kernel.num_launches == 0
    assert tried()
    assert tried()
    # Once for all matrices: in five ways many rows and few; in two some, and parts of both.
    assert (kernel.num_launches, some.num_launches) == (10, 4)
    assert not caplog.records


class Wrong:
    """Computes the last number of many rows a little differently."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        kernel = Kernel(2, name="_row_scaled_kernel")

        def launch(out: Tensor, *args: Any, **options: Any) -> None:
            kernel[grid](out, *args, **options)
            if len(out) > 256:
                out[-1, -1] += 0.5

        return launch


@interpreted
@pytest.mark.parametrize(
    ("kernel", "reason"), [(Broken(), "Cannot find ptxas)"), (Wrong(), "wrong")]
)
def test_what_fails_on_a_gpu_goes_on_by_the_other_kernel_with_one_warning(
    kernel: Any,
    reason: str,
    tried: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    some = Kernel(None, name="_row_scaled_few_rows_kernel")
    monkeypatch.setattr(module, "_row_scaled_kernel", kernel)
    monkeypatch.setattr(few_rows, "_row_scaled_few_rows_kernel", some)
    assert not tried()
    assert not tried()
    [record] = caplog.records
    assert reason in record.getMessage()
    assert "slower kernel" in record.getMessage()


class Nothing:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: None


@interpreted
@pytest.mark.parametrize(
    ("num_rows", "calls"), [(32, []), (33, ["some"]), (256, ["some"]), (257, ["many"])]
)
def test_some_rows_and_many_take_them(
    num_rows: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(products, "row_scaled_few_rows", lambda *_, **__: taken.append("some"))
    monkeypatch.setattr(products, "row_scaled_product", lambda *_, **__: taken.append("many"))
    monkeypatch.setattr(products, "_scaled_kernel", Nothing())
    out = torch.empty(num_rows, 256, dtype=torch.bfloat16)
    scaled_product(out, make_rows(num_rows, 512, torch.bfloat16), make_matrix(256, 512))
    assert taken == calls

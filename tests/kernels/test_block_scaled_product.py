"""The product of many rows in FP8 on Hopper GPUs, where blocks of weights share a scale.

On a CPU its kernel runs in plain torch.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import block_scaled
import pytest
import torch
from block_scaled import Broken, interpreted, make_matrix
from torch import Tensor

from outrider.kernels.model import block_scaled_experts, block_scaled_few_rows
from outrider.kernels.model import block_scaled_product as module
from outrider.kernels.model import scaled_trial as trial
from outrider.kernels.model.narrow_matrix import NarrowMatrix
from outrider.kernels.model.row_codes import RowCodes
from outrider.kernels.model.scaled_product import most_rows_in_parts
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS


@interpreted
def test_more_rows_than_its_programs_take_are_not_added_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = make_matrix(128, 512)
    assert most_rows_in_parts(matrix) == 256
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    assert most_rows_in_parts(matrix) == 128
    assert most_rows_in_parts(make_matrix(128, 384)) == 256  # which it is not for


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """Tries the kernels as on a Hopper GPU; whether they multiply by a matrix then."""

    def multiply(
        out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Any = None, *, num_splits: int = 1,
        gated: bool = False, adds: bool = False,
    ) -> None:  # fmt: skip
        how: dict[str, Any] = {"num_splits": num_splits, "gated": gated}
        if adds or len(x.codes) > block_scaled_few_rows.FEW_ROWS:
            module.block_scaled_product(out, x, matrix, bias, adds=adds, **how)
        else:
            block_scaled_few_rows.block_scaled_few_rows(out, x, matrix, bias, **how)

    failed: set[torch.device] = set()
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(trial, "scaled_product", multiply)
    monkeypatch.setattr(module, "failed", failed)

    def is_for(num_in: int = 256, dtype: torch.dtype = torch.bfloat16) -> bool:
        matrix = make_matrix(128, num_in)
        trial.try_scaled_product(matrix, dtype)
        return module.is_for(matrix)

    trial.try_blocks.cache_clear()
    yield is_for
    trial.try_blocks.cache_clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of those of many and of few rows, and of experts."""
    many, few = Kernel(2, name="_block_scaled_kernel"), Kernel(name="_block_scaled_few_rows_kernel")
    of_experts = Kernel(2, name="_experts_kernel")
    monkeypatch.setattr(block_scaled_experts, "_experts_kernel", of_experts)
    monkeypatch.setattr(module, "_block_scaled_kernel", many)
    monkeypatch.setattr(block_scaled_few_rows, "_block_scaled_few_rows_kernel", few)
    return [many, few, of_experts]


@interpreted
def test_kernels_that_work_are_used(
    tried: Callable[..., bool], kernels: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert not tried(384)  # which they are not for: not tried
    assert [kernel.num_launches for kernel in kernels] == [0, 0, 0]
    assert tried()
    assert tried()
    # Once for all matrices: gated, or added as a whole, which few rows are by a third kernel that
    # that of many rows stands for; few rows gated or in parts. Experts' layers beside dense ones.
    assert [kernel.num_launches for kernel in kernels] == [3, 4, 2]
    assert tried(dtype=torch.float32)  # for which that of experts is not
    assert [kernel.num_launches for kernel in kernels] == [6, 6, 2]
    assert not caplog.records


def wrong(kernel: Any, by: float = 0.5) -> Any:
    """Computes a number a little differently."""

    class Wrong:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(out: Tensor, *args: Any, **options: Any) -> None:
                kernel[grid](out, *args, **options)
                if out.dtype != torch.float8_e4m3fn:  # experts' inner numbers
                    out[..., -1, -1] += by

            return launch

    return Wrong()


@interpreted
@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda _: Broken(), "RuntimeError: Cannot find ptxas)"),
        (wrong, "wrong by"),
        (partial(wrong, by=torch.nan), "wrong by nan"),
    ],
)
@pytest.mark.parametrize("rows", ["many", "few", "of experts"])
def test_what_fails_on_a_gpu_goes_on_by_the_other_kernel_with_one_warning(
    rows: str,
    fail: Callable[[Any], Any],
    reason: str,
    tried: Callable[..., bool],
    kernels: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    many, few, of_experts = kernels
    if rows == "many":
        monkeypatch.setattr(module, "_block_scaled_kernel", fail(many))
    elif rows == "of experts":
        monkeypatch.setattr(block_scaled_experts, "_experts_kernel", fail(of_experts))
    else:
        monkeypatch.setattr(block_scaled_few_rows, "_block_scaled_few_rows_kernel", fail(few))
    assert not tried()
    assert not tried()
    assert [reason in record.getMessage() for record in caplog.records] == [True]

"""Which kernels for Hopper GPUs are used is found by trying them at start."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model import attention_parts, attention_trial, few_rows_attention
from outrider.kernels.model import prompt_attention as module
from outrider.kernels.model.batch_invariant_attention import Heads, random_layer
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel
    from warpgroup_attention import list_few_rows, list_prompts

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="the kernels do not run in Triton's interpreter"),
    pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels themselves run"),
]

HEADS = Heads(4, 2, 64, 64, 100, None, True)
LARGE_HEADS = Heads(2, 1, 256, 256, None, None, False)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """Tries the kernels as on a Hopper GPU; whether they are for such layers then."""

    def listed(ends: Tensor, lens: Tensor, slots: Tensor, num_rows: int, *_: Any, **__: Any) -> Any:
        batch = [(num_rows, int(lens[0]) - num_rows)]
        return list_prompts(batch, 2, 512) if num_rows > 16 else list_few_rows(batch, 2, 512, 2)

    for place in (module, few_rows_attention):
        monkeypatch.setattr(place, "num_programs", lambda *_: 3)
    for place, name, num in (
        (module, "_prompt_attention_kernel", 3),
        (few_rows_attention, "_few_rows_attention_kernel", 3),
        (attention_parts, "_merge_parts_kernel", None),
    ):
        monkeypatch.setattr(place, name, Kernel(num, name=name))
    monkeypatch.setattr(module, "failed", set())
    monkeypatch.setattr(attention_trial, "failed", module.failed)
    monkeypatch.setattr(attention_trial, "list_items", listed)
    for place in (module, attention_trial):
        monkeypatch.setattr(place, "has_warpgroups", lambda _: True)

    def is_for(heads: Heads = HEADS, dtype: torch.dtype = torch.bfloat16) -> bool:
        cpu = torch.device("cpu")
        attention_trial.try_warpgroup_attention(heads, 16, dtype, dtype, cpu)
        query, *pages, sinks = random_layer(heads, 32, 16, dtype, dtype, cpu)
        return module.is_for(query, *pages, heads.window, sinks)

    attention_trial.try_warpgroup_attention.cache_clear()
    yield is_for
    attention_trial.try_warpgroup_attention.cache_clear()


def test_a_kernel_that_works_is_used(
    tried: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_prompt_attention_kernel", kernel := Kernel(3))
    assert tried()
    assert tried()
    assert kernel.num_launches == 1  # once for all layers alike
    assert not tried(HEADS._replace(head_dim=96, value_dim=96))  # which it is not for: not tried
    assert kernel.num_launches == 1
    assert not caplog.records


def test_few_rows_are_tried_as_well(
    tried: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If one of the kernels fails, the other is not used: a layer's rows are summed alike."""
    rows = Kernel(3, name="_few_rows_attention_kernel")
    merging = Kernel(None, name="_merge_parts_kernel")
    compiled: list[tuple[int, int]] = []  # calls that are compiled together, launches before
    monkeypatch.setattr(
        attention_trial,
        "compile_together",
        lambda calls, device: compiled.append((len(calls), rows.num_launches)),
    )
    monkeypatch.setattr(module, "_prompt_attention_kernel", Kernel(3))
    monkeypatch.setattr(few_rows_attention, "_few_rows_attention_kernel", rows)
    monkeypatch.setattr(attention_parts, "_merge_parts_kernel", merging)
    assert tried(LARGE_HEADS)
    assert rows.num_launches == merging.num_launches == 1
    assert compiled == [(2, 0)]
    assert not caplog.records
    attention_trial.try_warpgroup_attention.cache_clear()
    monkeypatch.setattr(attention_parts, "_merge_parts_kernel", Broken(int))
    assert not tried(LARGE_HEADS)
    assert ["heads of 256 attend by a slower" in each.getMessage() for each in caplog.records] == [
        True
    ]


class Broken:
    """Fails for one of the two dtypes, in one of the ways that there are."""

    def __init__(self, fails: Callable[[], None]) -> None:
        self._fails, self._works = fails, Kernel(3)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(out: Tensor, *args: Any, **options: Any) -> None:
            if out.dtype == torch.float16:
                self._works[grid](out, *args, **options)
            else:
                self._fails()
                out.zero_()

        return launch


def _no_assembler() -> None:
    raise RuntimeError("Cannot find ptxas\nlook there")


@pytest.mark.parametrize(
    ("fails", "reason"), [(_no_assembler, "RuntimeError: Cannot find ptxas)"), (int, "wrong by")]
)
def test_what_fails_on_a_gpu_goes_on_by_the_other_kernel_with_one_warning(
    fails: Callable[[], None],
    reason: str,
    tried: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_prompt_attention_kernel", Broken(fails))
    assert not tried()
    assert not tried()
    assert tried(dtype=torch.float16)
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_too_little_memory_is_no_fault_of_the_kernel(
    tried: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "_prompt_attention_kernel", Broken(fail))
    with pytest.raises(torch.OutOfMemoryError):
        tried()

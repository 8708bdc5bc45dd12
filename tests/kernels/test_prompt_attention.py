"""The kernel of prompts for Hopper GPUs: every row sees its tokens, and no warp waits for ever.

On a CPU it runs in plain torch.
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from grids import pairwise
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels import triton_or_none
from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model import prompt_attention as module
from outrider.kernels.model import prompt_trial
from outrider.kernels.model.attention_items import PROMPT_ROWS, AttentionItems
from outrider.kernels.model.batch_invariant_attention import Heads, random_layer
from outrider.kernels.model.fp8 import as_bytes, to_e4m3
from outrider.kernels.model.prompt_attention import prompt_attention
from outrider.kernels.triton_or_none import HAS_GLUON, triton

if HAS_GLUON:
    from gluon_interpreter import DeadlockError, Kernel

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="it does not run in Triton's interpreter"),
    pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon"),
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not module.has_warpgroups(DEVICE), reason="needs a Hopper GPU"
    ),
]
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs")

# Rows and context before them: a whole prompt, a decode, a chunk that starts and ends anywhere, a
# sequence without rows (padding), a verification, the first row, one beside a border of splits.
BATCH = [(70, 0), (1, 90), (150, 133), (0, 0), (5, 62), (1, 0), (3, 254)]
UNIT = 256


class Layer(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


def items_of(batch: list[tuple[int, int]], group: int, unit: int) -> AttentionItems:
    """As `list_items` lists prompts; sequence i has the last slot but i."""
    block_q = PROMPT_ROWS // group
    items, first_row = [], 0
    for i, (rows, context) in enumerate(batch):
        for first in reversed(range(0, rows, block_q)):
            position, num = context + first, min(rows - first, block_q)
            slot = len(batch) - 1 - i
            item = first_row + first, num, position, slot, 0, unit, 0, context, context + rows
            items.append(item)
        first_row += rows
    room = [(-1,) * 9] * 3  # that no program may take up
    listed = torch.tensor([*items, *room], dtype=torch.int32, device=DEVICE)
    num_items = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    return AttentionItems(listed, num_items, 0, PROMPT_ROWS, block_q, 1, True, True)


def check(
    layer: Layer,
    batch: list[tuple[int, int]],
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    window: int | None = None,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    in_fp8: bool = False,
    unit: int = UNIT,
    seed: int = 0,
) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, "_prompt_attention_kernel", Kernel(num_programs=3, seed=seed))
    monkeypatch.setattr(module, "num_programs", lambda *_: 3)
    randn = normals(seed + sum(layer), torch.float32)
    num_heads, num_kv_heads, head_dim = layer
    num_rows, width = sum(rows for rows, _ in batch), -(-400 // page_size)
    num_pages = len(batch) * width + 1
    shape = num_pages, page_size, num_kv_heads, head_dim
    k_cache, v_cache = randn(*shape), randn(*shape)
    k_scale, v_scale = (0.5, 3.0)  # without FP8 they mean nothing
    if in_fp8:
        k_cache, v_cache = to_e4m3(k_cache / k_scale), to_e4m3(v_cache / v_scale)
    else:
        k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
    # Others' pages, and page 0, where padding writes, may hold NaN.
    table = torch.zeros(len(batch), width, dtype=torch.int32, device=DEVICE)
    pages = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
    pages = pages.to(DEVICE)
    clean_k, clean_v = k_cache.float(), v_cache.float()
    is_used = torch.zeros(num_pages * page_size, dtype=torch.bool, device=DEVICE)
    for i, (rows, context) in enumerate(batch):
        slot, end = len(batch) - 1 - i, rows + context
        own = pages[i * width : (i + 1) * width]
        first = max(0, context - window + 1) if window else 0
        num_used = -(-end // page_size)
        table[slot, first // page_size : num_used] = own[first // page_size : num_used].int()
        position = torch.arange(first if rows else end, end, device=DEVICE)
        is_used[own[position // page_size] * page_size + position % page_size] = True
    for cache in (k_cache, v_cache):
        as_bytes(cache).view(-1, num_kv_heads, head_dim)[~is_used] = 0x7F if in_fp8 else torch.nan
    # Heads before rows in memory, and rows that nobody has at the end.
    query = randn(num_heads, num_rows + 2, head_dim).to(dtype).transpose(0, 1)
    sinks = randn(num_heads).to(dtype) if has_sinks else None
    scale = head_dim**-0.5
    got = prompt_attention(
        query, k_cache, v_cache, items_of(batch, num_heads // num_kv_heads, unit), table, scale,
        window, sinks, k_scale, v_scale,
    )  # fmt: skip
    of_scales = (k_scale, v_scale) if in_fp8 else (1.0, 1.0)
    first_row = 0
    for i, (rows, context) in enumerate(batch):
        own = pages[i * width : (i + 1) * width]
        key, value = (
            (cache[own].flatten(0, 1)[: rows + context] * of_scale)
            for cache, of_scale in zip((clean_k, clean_v), of_scales, strict=True)
        )
        own_query = query[first_row : first_row + rows].float()
        expected = exact(own_query, key, value, scale, window, sinks)
        torch.testing.assert_close(
            got[first_row : first_row + rows].float(), expected, rtol=0.02, atol=0.03
        )
        first_row += rows


def exact(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of a sequence's last rows in float32. Shape: as query."""
    num_rows, group = len(query), query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = torch.einsum("thd,nhd->htn", query, key) * scale
    position = torch.arange(len(key), device=DEVICE)
    behind = position[len(key) - num_rows :, None] - position
    is_seen = (behind >= 0) & (behind < (window or len(key)))
    logits.masked_fill_(~is_seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[:, None, None].expand(-1, num_rows, 1)), 2)
    return torch.einsum("htn,nhd->thd", logits.softmax(2)[..., : len(key)], value)


@pytest.mark.parametrize(
    ("layer", "page_size", "window", "has_sinks", "in_fp8", "dtype"),
    pairwise(
        [Layer(4, 4, 64), Layer(8, 2, 128), Layer(6, 2, 64), Layer(8, 1, 128), Layer(7, 1, 64)],
        [16, 8, 64, 256],
        [None, 1, 70, 128],
        [False, True],
        [False, True],
        [torch.bfloat16, torch.float16],
    ),
)
def test_rows_see_their_tokens(
    layer: Layer,
    page_size: int,
    window: int | None,
    has_sinks: bool,
    in_fp8: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(
        layer, BATCH, page_size, monkeypatch, window=window, has_sinks=has_sinks, dtype=dtype,
        in_fp8=in_fp8,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_warps_and_copies_gives_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Layer(4, 2, 256), [(140, 100)], 16, monkeypatch, seed=seed)
    check(Layer(4, 2, 64), [(40, 280)], 32, monkeypatch, seed=seed, in_fp8=True)
    check(Layer(4, 2, 64), [(40, 280)], 32, monkeypatch, seed=seed, unit=1 << 30)


@interpreted
def test_warps_that_wait_for_ever_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = items_of([(1, 0)], 1, UNIT)
    empty.items[0, 1] = 0  # without tokens nothing is loaded, which the other warps wait for
    monkeypatch.setattr(module, "_prompt_attention_kernel", Kernel(1))
    cache = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(DeadlockError):
        prompt_attention(cache[0, :1], cache, cache, empty, table, 1.0)


HEADS = Heads(4, 2, 64, 64, 100, None, True)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """Tries the kernel as on a Hopper GPU; whether it is for such layers then."""

    def listed(ends: Tensor, lens: Tensor, slots: Tensor, num_rows: int, *_: Any, **__: Any) -> Any:
        return items_of([(num_rows, int(lens[0]) - num_rows)], 2, 512)

    monkeypatch.setattr(module, "num_programs", lambda *_: 3)
    monkeypatch.setattr(module, "failed", set())
    monkeypatch.setattr(prompt_trial, "failed", module.failed)
    monkeypatch.setattr(prompt_trial, "list_items", listed)
    for place in (module, prompt_trial):
        monkeypatch.setattr(place, "has_warpgroups", lambda _: True)

    def is_for(heads: Heads = HEADS, dtype: torch.dtype = torch.bfloat16) -> bool:
        cpu = torch.device("cpu")
        prompt_trial.try_prompt_attention(heads, 16, dtype, dtype, cpu)
        query, *pages, sinks = random_layer(heads, 32, 16, dtype, dtype, cpu)
        return module.is_for(query, *pages, heads.window, sinks)

    prompt_trial.try_prompt_attention.cache_clear()
    yield is_for
    prompt_trial.try_prompt_attention.cache_clear()


@interpreted
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


@interpreted
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


@interpreted
def test_too_little_memory_is_no_fault_of_the_kernel(
    tried: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "_prompt_attention_kernel", Broken(fail))
    with pytest.raises(torch.OutOfMemoryError):
        tried()


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0"])
def test_of_other_versions_of_triton_nothing_of_gluon_is_touched(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    for name in [name for name in sys.modules if name.startswith("triton.experimental")]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    fresh = runpy.run_path(triton_or_none.__file__, run_name="outrider.kernels.fresh")
    assert not fresh["HAS_GLUON"]
    assert fresh["triton"] is triton
    assert fresh["hopper"].mbarrier  # whatever its modules name

"""What Triton and ptxas make of the kernels of attention; needs no GPU."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernel_launches import attention, deep, empty

from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.paged_attention import paged_attention
from outrider.kernels.model.prompt_attention import is_for
from outrider.kernels.triton_or_none import HAS_GLUON

machine_code = pytest.importorskip("machine_code", exc_type=ImportError)
pytestmark = machine_code.MARKS


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_prompts_do_not_overwrite_what_is_multiplied(dtype: torch.dtype) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        attention(1, 300, True, dtype)
    assert ("warp_specialize" in kernels[-1].asm["ttgir"]) == HAS_GLUON
    assert kernels[-1].metadata.shared <= machine_code.H100.shared_bytes
    machine_code.check_products(kernels[-1:])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("heads", "page", "window", "has_sinks", "cache"),
    [
        ((64, 8, 64), 16, 128, True, torch.bfloat16),  # gpt-oss
        ((64, 8, 64), 32, None, True, torch.float8_e4m3fn),
        ((5, 1, 128), 8, 4096, True, torch.float8_e4m3fn),
        ((24, 4, 256), 256, 1024, False, torch.bfloat16),
    ],
)
def test_every_kind_of_prompt_fits_a_hopper_gpu(
    heads: tuple[int, int, int], page: int, window: int | None, has_sinks: bool, cache: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    with machine_code.launches(machine_code.H100) as kernels:
        begins, lens = empty(2, dtype=torch.int32), empty(1, dtype=torch.int64)
        items = list_items(begins, lens, lens, 300, num_kv_heads, num_heads // num_kv_heads, 4096)
        pages = empty(9, page, num_kv_heads, head_dim, dtype=cache)
        table = empty(1, 4096 // page, dtype=torch.int32)
        query, sinks = empty(300, num_heads, head_dim), empty(num_heads) if has_sinks else None
        paged_attention(query, pages, pages, items, table, 1.0, window, sinks=sinks)
    assert ("warp_specialize" in kernels[-1].asm["ttgir"]) == HAS_GLUON
    assert kernels[-1].metadata.shared <= machine_code.H100.shared_bytes
    machine_code.check_products(kernels[-1:])


def few_rows(
    heads: tuple[int, int, int],
    window: int | None = None,
    has_sinks: bool = False,
    softcap: float | None = None,
    page: int = 16,
    cache: torch.dtype = torch.bfloat16,
    *,
    causal: bool = True,
) -> None:
    """Verifications of four rows, in two sequences."""
    num_heads, num_kv_heads, head_dim = heads
    begins, lens = empty(3, dtype=torch.int32), empty(2, dtype=torch.int64)
    items = list_items(
        begins, lens, lens, 8, num_kv_heads, num_heads // num_kv_heads, 8192, batch_invariant=True
    )
    pages = empty(9, page, num_kv_heads, head_dim, dtype=cache)
    table = empty(2, 8192 // page, dtype=torch.int32)
    query, sinks = empty(8, num_heads, head_dim), empty(num_heads) if has_sinks else None
    paged_attention(query, pages, pages, items, table, 1.0, window, softcap, sinks, causal=causal)


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    ("heads", "window", "has_sinks", "page"),
    [
        ((32, 8, 128), None, False, 16),  # Qwen3-8B
        deep((64, 8, 128), 4096, True, 64),
        deep((64, 1, 128), None, False, 256),
        deep((64, 8, 64), None, True, 16),  # gpt-oss
        ((64, 8, 64), 128, True, 16),
        ((24, 4, 256), None, False, 16),  # Qwen3.6-27B
        deep((16, 2, 256), None, False, 16),  # Qwen3.6-35B-A3B
        deep((8, 4, 256), 1024, False, 16),
        deep((8, 1, 256), 512, True, 64),
        deep((64, 1, 256), None, True, 8),
    ],
)
def test_few_rows_fit_a_hopper_gpu(
    heads: tuple[int, int, int], window: int | None, has_sinks: bool, page: int
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        few_rows(heads, window, has_sinks, page=page)
    *_, rows, merging = kernels
    assert rows.metadata.name == "_few_rows_attention_kernel"
    per_sm = 2 if heads[2] == 64 else 1
    assert per_sm * (rows.metadata.shared + 1024) <= machine_code.H100.shared_bytes + 1024
    assert per_sm * 32 * rows.metadata.num_warps * rows.metadata.maxnreg <= 1 << 16
    machine_code.check_products([rows])
    code = machine_code.disassembled(rows)
    assert heads[2] > 128 or not re.search(r"\b(STL|LDL)\b", code), "registers are spilled"
    # What was listed before the pass is read before queries are there.
    attending = code[code.index("PREEXIT") : code.index("LDG.E.128")]
    listed, _ = attending.split("ACQBULK")
    assert len(re.findall(r"\bLDG\.E R", listed)) == 6
    assert merging.metadata.name == "_merge_parts_kernel"
    loads, sums = machine_code.disassembled(merging).split("BAR.SYNC")
    # Four of a part's sums a thread: of eight splits, all at once.
    assert len(re.findall(r"\bLDG\.E\.128\b", loads)) == 8
    assert "LDG.E.128" not in sums
    assert "MUFU.EX2" not in loads


@pytest.mark.parametrize("num_rows", [2, 300])
def test_attention_refuses_heads_that_are_not_dense(num_rows: int) -> None:
    """Whichever kernel would take them."""
    with machine_code.launches(machine_code.H100):
        begins, lens = empty(3, dtype=torch.int32), empty(2, dtype=torch.int64)
        items = list_items(begins, lens, lens, num_rows, 2, 8, 8192, batch_invariant=True)
        query, pages = empty(256, num_rows, 16).permute(1, 2, 0), empty(9, 16, 2, 256)
        table = empty(2, 512, dtype=torch.int32)
        with pytest.raises(AssertionError):
            paged_attention(query, pages, pages, items, table, 1.0)


@pytest.mark.deep
@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    "launch",
    [
        partial(few_rows, (71, 1, 64)),
        partial(few_rows, (32, 8, 128), cache=torch.float8_e4m3fn),
        partial(few_rows, (128, 1, 256)),  # too many query heads for a warpgroup
        partial(few_rows, (16, 2, 256), softcap=5.0),
        partial(few_rows, (16, 2, 256), page=5),
        partial(few_rows, (16, 2, 256), cache=torch.float8_e4m3fn),
        partial(few_rows, (16, 2, 256), causal=False),
    ],
)
def test_other_few_rows_take_the_kernel_of_other_gpus(launch: Callable[[], None]) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        launch()
    assert kernels[-1].metadata.name == "_paged_attention_kernel"
    assert kernels[-1].metadata.shared <= machine_code.H100.shared_bytes


def test_only_a_hopper_gpu_takes_its_kernel_for_prompts() -> None:
    for gpu in (machine_code.RTX_4090, machine_code.H100, machine_code.B200, machine_code.RTX_5090):
        with machine_code.launches(gpu):
            pages = empty(9, 16, 2, 128)
            takes = is_for(empty(300, 8, 128), pages, pages, None, None)
        assert takes == (HAS_GLUON and gpu is machine_code.H100)


@pytest.mark.parametrize("num_seqs", [1, 3, 64])
def test_one_kernel_lists_all_kinds_of_batches(num_seqs: int) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        for num, rows_each, batch_invariant in [
            (1, 1, False),
            (num_seqs, 4, True),
            (num_seqs, 99, False),
        ]:
            begins, lens = empty(num + 1, dtype=torch.int64), empty(num, dtype=torch.int64)
            list_items(
                begins, lens, lens, num * rows_each, 8, 4, 40_000, batch_invariant=batch_invariant
            )
    assert len({kernel.hash for kernel in kernels}) == 1

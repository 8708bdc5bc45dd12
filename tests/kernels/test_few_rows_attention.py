"""The kernel of few rows for Hopper GPUs: every row sees its tokens, its splits are merged, and no
warp waits for ever. On a CPU it runs in plain torch.
"""

from collections.abc import Callable

import pytest
import torch
from block_scaled import MARKS, interpreted
from grids import pairwise
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model import attention_parts
from outrider.kernels.model import few_rows_attention as module
from outrider.kernels.model import paged_attention as paged
from outrider.kernels.model.few_rows_attention import few_rows_attention
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel
    from warpgroup_attention import Layer, exact, list_few_rows, random_pages

pytestmark = MARKS

# Decodes, verifications, the first row, padding, rows without tokens, rows that end a split and
# rows of which some begin one.
BATCH = [(1, 90), (4, 600), (1, 0), (0, 0), (2, -2), (5, 62), (3, 126), (9, 380)]
UNIT = 128
NO_UNIT = 1 << 30


def interpret(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> "Kernel":
    """Have the kernels run in plain torch, where there is no GPU. Returns the one that merges."""
    merging = Kernel(None, name="_merge_parts_kernel")
    if DEVICE.type == "cpu":
        kernel = Kernel(num_programs=3, seed=seed, name="_few_rows_attention_kernel")
        monkeypatch.setattr(module, "_few_rows_attention_kernel", kernel)
        monkeypatch.setattr(attention_parts, "_merge_parts_kernel", merging)
    monkeypatch.setattr(module, "num_programs", lambda *_: 3)
    return merging


def check(
    layer: "Layer",
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    window: int | None = None,
    has_sinks: bool = False,
    num_splits: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> None:
    merging = interpret(monkeypatch, seed)
    randn = normals(seed + layer.head_dim, torch.float32)
    num_rows = sum(rows for rows, _ in BATCH)
    pages = random_pages(BATCH, layer, page_size, dtype, window, None, seed)
    # Heads before rows in memory, and rows that nobody has at the end.
    query = randn(layer.num_heads, num_rows + 2, layer.head_dim).to(dtype).transpose(0, 1)
    sinks = randn(layer.num_heads).to(dtype) if has_sinks else None
    scale = layer.head_dim**-0.5
    items = list_few_rows(BATCH, layer.group, UNIT if num_splits > 1 else NO_UNIT, num_splits)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", empty)
        got = few_rows_attention(
            query, pages.k_cache, pages.v_cache, items, pages.table, scale, window, sinks
        )
    if DEVICE.type == "cpu":
        assert merging.num_launches == (num_splits > 1)
    first_row = 0
    for (rows, context), (key, value) in zip(BATCH, pages.own, strict=True):
        own = got[first_row : first_row + rows].float()
        if context < 0:
            assert not own.any()
        else:
            own_query = query[first_row : first_row + rows].float()
            expected = exact(own_query, key, value, scale, window, sinks)
            torch.testing.assert_close(own, expected, rtol=0.02, atol=0.03)
        first_row += rows


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory as it may be found."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    extremes = torch.tensor([1 << 30, -(1 << 30)], dtype=dtype, device=device)
    return extremes[torch.randint(2, shape, device=device)]


@pytest.mark.parametrize(
    ("layer", "page_size", "window", "has_sinks", "num_splits", "dtype"),
    pairwise(
        [(6, 1, 256), (4, 2, 128), (8, 1, 256), (4, 2, 256), (2, 1, 64)],
        [16, 8, 64, 256],
        [None, 1, 70, 128],
        [False, True],
        [5, 1],
        [torch.bfloat16, torch.float16],
    ),
)
def test_rows_see_their_tokens(
    layer: tuple[int, int, int],
    page_size: int,
    window: int | None,
    has_sinks: bool,
    num_splits: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(
        Layer(*layer), page_size, monkeypatch, window=window, has_sinks=has_sinks,
        num_splits=num_splits, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_warps_and_copies_gives_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Layer(6, 1, 256), 16, monkeypatch, seed=seed)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_parts_of_several_splits_are_added(
    many: bool, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 splits, more than are loaded at once, each row sees some. A row of one is finished."""
    interpret(monkeypatch)
    monkeypatch.setattr(attention_parts, "_MANY_ROWS", 5 if many else 6)
    num_rows, num_heads, num_splits, dim = 5, 11, 20, 64
    randn = normals(0, torch.float32)
    parts = randn(num_rows, num_heads, num_splits, dim)
    states = torch.stack((3 * randn(*parts.shape[:3]), randn(*parts.shape[:3]).abs()), 3)
    seen = torch.tensor([[0, 19], [3, 3], [11, 18], [12, 19], [0, 7]], dtype=torch.int32)
    for row, (first, last) in enumerate(seen.tolist()):
        is_seen = torch.zeros(num_splits, dtype=torch.bool)
        is_seen[first : last + 1] = True
        parts[row, :, ~is_seen.to(DEVICE)] = torch.nan
        states[row, :, ~is_seen.to(DEVICE)] = torch.nan
    sinks = randn(num_heads) if has_sinks else None
    got = torch.full((num_rows, num_heads, dim), 7.0, device=DEVICE)
    attention_parts.merge_parts(got, parts, states, seen.to(DEVICE), sinks)
    for row, (first, last) in enumerate(seen.tolist()):
        if first == last:
            assert (got[row] == 7.0).all(), "a finished row is written again"
            continue
        best, total, acc = torch.full((num_heads,), -torch.inf), torch.zeros(num_heads), 0.0
        best, total = best.to(DEVICE), total.to(DEVICE)
        adds = [(*states[row, :, i].unbind(1), parts[row, :, i]) for i in range(first, last + 1)]
        if sinks is not None:
            adds.append((sinks * 1.4426950408889634, torch.ones_like(sinks), parts.new_zeros(dim)))
        for part_best, part_total, part in adds:
            new_best = torch.maximum(best, part_best)
            decay, part_decay = torch.exp2(best - new_best), torch.exp2(part_best - new_best)
            best, total = new_best, total * decay + part_total * part_decay
            acc = acc * decay[:, None] + part * part_decay[:, None]
        torch.testing.assert_close(got[row], acc / total[:, None], rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("on_hopper", "block"), [(True, 128), (False, 64)])
def test_rows_of_very_wide_groups_are_summed_as_prompts_are(
    on_hopper: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128 query heads to a KV head, few rows are for Triton, prompts for warpgroups."""
    found = {}

    class Launches:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **constants: found.update(constants)

    monkeypatch.setattr(paged, "_paged_attention_kernel", Launches())
    monkeypatch.setattr(paged, "is_for", lambda *_: on_hopper)
    monkeypatch.setattr(paged, "num_programs", lambda *_: 3)
    cache = torch.zeros(9, 16, 1, 128, dtype=torch.bfloat16)
    query = torch.zeros(2, 128, 128, dtype=torch.bfloat16)
    items = list_few_rows([(2, 30)], 16, UNIT, 1)
    table = torch.zeros(1, 4, dtype=torch.int32)
    paged.paged_attention(query, cache, cache, items, table, 1.0)
    assert found["BLOCK_N"] == block

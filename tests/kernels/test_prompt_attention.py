"""The kernel of prompts for Hopper GPUs: every row sees its tokens, and no warp waits for ever.

On a CPU it runs in plain torch.
"""

import runpy
import sys

import pytest
import torch
from block_scaled import MARKS, interpreted
from grids import pairwise
from random_tensors import normals
from verification import DEVICE

from outrider.kernels import triton_or_none
from outrider.kernels.model import prompt_attention as module
from outrider.kernels.model.prompt_attention import prompt_attention
from outrider.kernels.triton_or_none import HAS_GLUON, triton

if HAS_GLUON:
    from gluon_interpreter import DeadlockError, Kernel
    from warpgroup_attention import Layer, exact, list_prompts, random_pages

pytestmark = MARKS

# Rows and context before them: a whole prompt, a decode, a chunk that starts and ends anywhere, a
# sequence without rows (padding), a verification, the first row, one beside a border of splits.
BATCH = [(70, 0), (1, 90), (150, 133), (0, 0), (5, 62), (1, 0), (3, 254)]
UNIT = 256


def check(
    layer: "Layer",
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
    randn = normals(seed + layer.head_dim, torch.float32)
    num_rows = sum(rows for rows, _ in batch)
    scales = (0.5, 3.0)  # without FP8 they mean nothing
    of_pages = scales if in_fp8 else None
    pages = random_pages(batch, layer, page_size, dtype, window, of_pages, seed)
    # Heads before rows in memory, and rows that nobody has at the end.
    query = randn(layer.num_heads, num_rows + 2, layer.head_dim).to(dtype).transpose(0, 1)
    sinks = randn(layer.num_heads).to(dtype) if has_sinks else None
    scale = layer.head_dim**-0.5
    items = list_prompts(batch, layer.group, unit)
    got = prompt_attention(
        query, pages.k_cache, pages.v_cache, items, pages.table, scale, window, sinks, *scales
    )
    first_row = 0
    for (rows, _), (key, value) in zip(batch, pages.own, strict=True):
        own_query = query[first_row : first_row + rows].float()
        expected = exact(own_query, key, value, scale, window, sinks)
        torch.testing.assert_close(
            got[first_row : first_row + rows].float(), expected, rtol=0.02, atol=0.03
        )
        first_row += rows


@pytest.mark.parametrize(
    ("layer", "page_size", "window", "has_sinks", "in_fp8", "dtype"),
    pairwise(
        [(4, 4, 64), (8, 2, 128), (6, 2, 64), (8, 1, 128), (7, 1, 64)],
        [16, 8, 64, 256],
        [None, 1, 70, 128],
        [False, True],
        [False, True],
        [torch.bfloat16, torch.float16],
    ),
)
def test_rows_see_their_tokens(
    layer: tuple[int, int, int],
    page_size: int,
    window: int | None,
    has_sinks: bool,
    in_fp8: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(
        Layer(*layer), BATCH, page_size, monkeypatch, window=window, has_sinks=has_sinks,
        dtype=dtype, in_fp8=in_fp8,
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
    empty = list_prompts([(1, 0)], 1, UNIT)
    empty.items[0, 1] = 0  # without tokens nothing is loaded, which the other warps wait for
    monkeypatch.setattr(module, "_prompt_attention_kernel", Kernel(1))
    cache = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(DeadlockError):
        prompt_attention(cache[0, :1], cache, cache, empty, table, 1.0)


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

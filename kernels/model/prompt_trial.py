"""Tries at start whether `prompt_attention` works on the GPU at hand.

If not, layers take the kernel of other GPUs, which sums in the same order.
"""

import functools
from functools import partial

import torch
from torch import Tensor

from .attention_items import list_items
from .attention_reference import paged_attention_reference, whole_block
from .batch_invariant_attention import Heads, random_layer
from .prompt_attention import Variant, failed, is_for, prompt_attention
from .warpgroups import has_warpgroups, works

_TOKENS = 768  # more than a split, and a multiple of all sizes of pages
_ROWS = 80  # the last of them
_MOST_ERROR = 0.02  # relative; weights that are rounded to bfloat16 make 0.004


@functools.cache
@torch.inference_mode()
def try_prompt_attention(
    heads: Heads,
    page_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """If `prompt_attention` is for such layers, compute a short prompt by it; if that fails, log
    why, and let it be for them no more. To be called where kernels run: in no capture.
    """
    if not has_warpgroups(device):
        return
    layer = random_layer(heads, _TOKENS, page_size, dtype, cache_dtype, device)
    query, keys, values, sinks = layer
    window = heads.window and min(heads.window, _TOKENS // 3)
    if not is_for(query, keys, values, window, sinks):
        return
    otherwise = f"heads of {heads.head_dim} attend to prompts by a slower kernel"
    if not works(partial(_error, heads, window, *layer), _MOST_ERROR, otherwise):
        failed.add(Variant.of(query, keys, window, sinks))


def _error(
    heads: Heads,
    window: int | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
) -> float:
    """The relative error of the last rows of a prompt, whose pages lie backwards."""
    device, group = query.device, heads.num_heads // heads.num_kv_heads
    table = torch.arange(len(keys), device=device, dtype=torch.int32).flip(0)
    ends = torch.tensor([0, _ROWS], device=device)
    slots, lens = torch.zeros_like(ends[:1]), torch.full_like(ends[:1], _TOKENS)
    items = list_items(
        ends, lens, slots, _ROWS, heads.num_kv_heads, group, _TOKENS, batch_invariant=True
    )
    rows, scale = query[-_ROWS:], heads.head_dim**-0.5
    got = prompt_attention(rows, keys, values, items, table[None], scale, window, sinks)

    exact = paged_attention_reference(
        rows.float(),
        keys.float(),
        values.float(),
        table,
        whole_block(_ROWS, _TOKENS, window, group, torch.float32, device),
        scale,
        sinks=sinks,
    )
    return float((got.float() - exact).norm() / exact.norm())

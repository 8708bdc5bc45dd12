"""Tries at start whether `prompt_attention` and `few_rows_attention` work on the GPU at hand.

If not, layers take the kernel of other GPUs, for all rows: whatever computes a layer's rows sums in
one order.
"""

import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..compiling import compile_together
from .attention_items import list_items
from .attention_reference import paged_attention_reference, whole_block
from .batch_invariant_attention import Heads, random_layer
from .few_rows_attention import few_rows_attention, takes
from .prompt_attention import Variant, failed, is_for, prompt_attention
from .warpgroups import has_warpgroups, works

_TOKENS = 768  # more than a split, and a multiple of all sizes of pages
_PROMPT, _FEW = 80, 4  # of their rows, the last
_MOST_ERROR = 0.02  # relative; weights that are rounded to bfloat16 make 0.004


@functools.cache
@torch.inference_mode()
def try_warpgroup_attention(
    heads: Heads, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> None:
    """If kernels for Hopper GPUs are for such layers, compute a short prompt and a few rows by
    them; if that fails, log why, and let them be for such layers no more. To be called where
    kernels run: in no capture.
    """
    if not has_warpgroups(device):
        return
    layer = random_layer(heads, _TOKENS, page_size, dtype, cache_dtype, device)
    query, keys, values, sinks = layer
    window = heads.window and min(heads.window, _TOKENS // 3)
    if not is_for(query, keys, values, window, sinks):
        return
    otherwise = f"heads of {heads.head_dim} attend by a slower kernel"
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
    """The largest relative error of a kernel's rows, the last of a sequence whose pages lie
    backwards.
    """
    device, group = query.device, heads.num_heads // heads.num_kv_heads
    table = torch.arange(len(keys), device=device, dtype=torch.int32).flip(0)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    lens, scale = slots + _TOKENS, heads.head_dim**-0.5
    kernels: list[tuple[int, Callable[..., Tensor]]] = [(_PROMPT, prompt_attention)]
    if takes(query, keys):
        kernels.append((_FEW, few_rows_attention))
    calls, exact = [], []
    for num_rows, attention in kernels:
        ends = torch.tensor([0, num_rows], device=device)
        items = list_items(
            ends, lens, slots, num_rows, heads.num_kv_heads, group, _TOKENS, batch_invariant=True
        )
        rows = query[-num_rows:]
        calls.append(
            partial(attention, rows, keys, values, items, table[None], scale, window, sinks)
        )
        exact.append(
            paged_attention_reference(
                rows.float(),
                keys.float(),
                values.float(),
                table,
                whole_block(num_rows, _TOKENS, window, group, torch.float32, device),
                scale,
                sinks=sinks,
            )
        )
    compile_together(calls, device)
    errors = [(call().float() - y).norm() / y.norm() for call, y in zip(calls, exact, strict=True)]
    return float(torch.stack(errors).max())  # NaN if one is

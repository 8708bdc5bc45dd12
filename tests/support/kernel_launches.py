"""Launches of kernels, over tensors without memory, for `machine_code`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.delta_net import delta_net
from outrider.kernels.model.expert_matrix import ExpertMatrix
from outrider.kernels.model.mamba2 import mamba2
from outrider.kernels.model.narrow_matrix import Kind, NarrowMatrix, has_4_bits
from outrider.kernels.model.paged_attention import paged_attention
from outrider.kernels.model.rows import BatchRows
from outrider.kernels.model.state_layer import StateHeads, StateMemory, StateWeights, rows_kept

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def deep(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.deep)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def make_matrix(kind: Kind, num_out: int, num_in: int, group: int) -> NarrowMatrix:
    codes = empty(num_out, num_in // 2 if has_4_bits(kind) else num_in, dtype=torch.uint8)
    codes = codes.view(DTYPES.get(kind, torch.uint8))
    scale, factor = empty(-(-num_in // group), num_out, dtype=torch.float16), None
    if kind == "nvfp4":
        scale = empty(-(-num_in // 64), num_out, dtype=torch.int32)
        factor = empty(num_out, dtype=torch.float32)
    return NarrowMatrix(kind, codes, scale, None, num_in, group, factor=factor)


def make_experts(num_in: int) -> ExpertMatrix:
    matrix = make_matrix("fp4", 8 * 960, num_in, 32)
    scale = empty(*matrix.scale.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return ExpertMatrix(matrix._replace(scale=scale), empty(8 * 960), 8)


def attention(
    num_seqs: int, rows_each: int, batch_invariant: bool, dtype: torch.dtype = torch.bfloat16
) -> None:
    num_rows, page = num_seqs * rows_each, 16
    begins = empty(num_seqs + 1, dtype=torch.int32)
    lens, slots = empty(2, num_seqs, dtype=torch.int64)
    items = list_items(begins, lens, slots, num_rows, 8, 4, 4096, batch_invariant=batch_invariant)
    cache = empty(1, page, 8, 128, dtype=dtype)
    pages = empty(num_seqs, 4096 // page, dtype=torch.int32)
    paged_attention(empty(num_rows, 32, 128), cache, cache, items, pages, 1.0)


def states(heads: StateHeads, num_rows: int = 300) -> None:
    """A prompt's rows, and those of drafts."""
    num_values, num_slots = heads.num_value_heads, 3
    numbers = empty(num_values, dtype=torch.float32)
    weights = StateWeights(empty(4, heads.num_channels).t(), numbers, numbers)
    if not heads.corrects:
        weights = weights._replace(bias=empty(heads.num_channels), skip=numbers)
    state = empty(num_slots, num_values, heads.key_dim, heads.value_dim, dtype=torch.float32)
    ring = empty(num_slots, rows_kept(4, 3), heads.row_width)
    tokens = empty(num_slots, dtype=torch.int64)
    bounds = empty(num_slots + 1, dtype=torch.int64)
    rows = BatchRows(tokens, tokens, tokens, tokens, tokens, bounds)
    memory = StateMemory(state, ring, tokens)
    layer = delta_net if heads.corrects else mamba2
    x = empty(num_rows, heads.num_channels), empty(num_rows, heads.all_scalars)
    layer(*x, heads, weights, memory, rows, tokens)


def delta_nets() -> None:
    states(StateHeads(16, 32, 128, 128, num_scalars=2))


def mamba2s() -> None:
    states(StateHeads(8, 64, 128, 64, num_scalars=1))

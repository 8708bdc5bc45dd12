"""Sampling parameters of a batch's rows, from those of the slots, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.sampling import Sampling


def take_sampling(sampling: Sampling, index: Tensor) -> Sampling:
    """Shape: each field [num_slots], index [B] int64 -> each field [B]."""
    if not uses_triton(index):
        return sampling.take(index)
    rows = Sampling(*(torch.empty(len(index), dtype=x.dtype, device=x.device) for x in sampling))
    _take_sampling_kernel[(triton.cdiv(len(index), 128),)](
        *rows, *sampling, index, index.stride(0), len(index), BLOCK=128
    )
    return rows


@triton.jit(do_not_specialize=["num_rows"])
def _take_sampling_kernel(
    out_temperature_ptr,
    out_top_k_ptr,
    out_top_p_ptr,
    out_min_p_ptr,
    out_seed_ptr,
    out_rule_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    rule_ptr,
    index_ptr,
    index_stride,
    num_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(index_ptr + row * index_stride, mask=inside, other=0)
    tl.store(out_temperature_ptr + row, tl.load(temperature_ptr + slot, mask=inside), mask=inside)
    tl.store(out_top_k_ptr + row, tl.load(top_k_ptr + slot, mask=inside), mask=inside)
    tl.store(out_top_p_ptr + row, tl.load(top_p_ptr + slot, mask=inside), mask=inside)
    tl.store(out_min_p_ptr + row, tl.load(min_p_ptr + slot, mask=inside), mask=inside)
    tl.store(out_seed_ptr + row, tl.load(seed_ptr + slot, mask=inside), mask=inside)
    tl.store(out_rule_ptr + row, tl.load(rule_ptr + slot, mask=inside), mask=inside)

"""Sums over K in parts: the last program of a tile to be done adds up the parts of all."""

import functools

import torch
from torch import Tensor

from ..triton_or_none import tl, triton


@functools.cache
def counters(device: torch.device, size: int) -> Tensor:
    """For each tile, how many parts are done; every launch leaves zeros."""
    return torch.zeros(size, dtype=torch.int32, device=device)


@triton.jit
def sum_by_the_last(
    part_at, stride, mask, counter, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Called by each program of a tile, after it has stored its part.

    Returns the sum of the parts in their order, [BLOCK_N, BLOCK_M], and whether this is the last
    program; for the others the sum is 0.
    """
    tl.debug_barrier()  # all stores of the program must come before its count
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1
    tl.store(counter, 0, mask=is_last)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for each in tl.static_range(PARTS):
        # Not from a cache that may have been filled before the others stored.
        total += tl.load(
            part_at + each * stride, mask=mask & is_last, other=0.0, cache_modifier=".cg"
        )
    return total, is_last

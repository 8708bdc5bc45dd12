"""How a product of rows with a matrix is shared out among programs."""

import functools

import torch

from .._dispatch import num_programs
from ..triton_or_none import tl, triton

BLOCK_N = 64  # outputs of a program, at few rows
MAX_SPLIT_ROWS = 256  # beyond this, programs without splits fill a GPU


def num_splits_of(
    num_out: int, num_in: int, device: torch.device, *, multiple: int, least: int, per_sm: int = 1
) -> int:
    """How many parts a product is split into over its inputs, a power of two.

    The most that leave `per_sm` programs a multiprocessor. Each part has at least `least` inputs,
    and a multiple of `multiple`.
    """
    most = num_programs(device, per_sm) // triton.cdiv(num_out, BLOCK_N)
    splits, share = 1, num_in
    while 2 * splits <= most and share % (2 * multiple) == 0 and share // 2 >= least:
        splits, share = 2 * splits, share // 2
    return splits


@triton.jit
def tile_of_program(program, num_m, num_n, TOGETHER: tl.constexpr):
    """The tile (m, n) of a program, of num_m * num_n tiles.

    TOGETHER programs in a row share n, and the next as many the same tiles m. So what they read
    stays in the L2 cache.
    """
    first = program // (TOGETHER * num_n) * TOGETHER
    together = tl.minimum(num_m - first, TOGETHER)
    program = program % (TOGETHER * num_n)
    return first + program % together, program // together


@functools.cache
def counters(device: torch.device, size: int) -> torch.Tensor:
    """For each tile, how many of its programs are done; every launch leaves zeros."""
    return torch.zeros(size, dtype=torch.int32, device=device)

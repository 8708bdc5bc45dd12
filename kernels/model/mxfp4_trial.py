"""Tries at load whether `mxfp4_few_rows` works on the GPU at hand: whether rows have the same bits
by it and by the kernel for any GPU. Otherwise experts always use the kernel for any GPU.
"""

import functools
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import num_programs
from .expert_matrix import ExpertMatrix, Glu
from .expert_tiles import ExpertTiles, tiles_reference
from .experts_product import experts_product
from .mxfp4_few_rows import failed
from .narrow_matrix import NarrowMatrix
from .routing import Routing
from .warpgroups import has_warpgroups, largest_difference, works

_TOP_K, _EXPERTS = 2, 4
# Rows, and whether there are many tiles. Each takes another form, for 64, 32, 16 and 8 rows of a
# tile; those that compile longest come first.
_ROWS = ((50, False), (20, False), (13, False), (7, True), (5, False))
# More stages than are copied ahead, the last one not whole; of programs of two tiles of outputs the
# last one is not whole, with and without a gate.
_NUM_IN, _NUM_OUT = 1600, 320
_GLU = Glu(1.702, 7.0, 1.0)


@functools.cache
@torch.inference_mode()
def try_mxfp4_few_rows(device: torch.device, dtype: torch.dtype) -> None:
    """If it is for that GPU, multiply a few rows by it; if that fails, log why, and use it for no
    layer. To be called where kernels run: in no capture.
    """
    if has_warpgroups(device) and dtype == torch.bfloat16:
        otherwise = "few rows are multiplied by MXFP4 experts in a slower kernel"
        if not works(partial(_error, device), 0.0, otherwise):
            failed.add(device)


def _error(device: torch.device) -> float:
    """The relative difference between the same rows by both kernels."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def bytes_of(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(
            low, high, shape, generator=generator, dtype=torch.uint8, device=device
        )

    codes = bytes_of(0, 256, _EXPERTS * _NUM_OUT, _NUM_IN // 2)
    scale = bytes_of(118, 123, _NUM_IN // 32, len(codes)).view(torch.float8_e8m0fnu)
    matrix = NarrowMatrix("fp4", codes, scale, None, _NUM_IN, 32)
    layer = ExpertMatrix(matrix, randn(len(codes)).bfloat16(), _EXPERTS)

    def routing_of(num_rows: int, has_many_tiles: bool) -> Routing:
        ids = randn(num_rows, _EXPERTS).topk(_TOP_K).indices.int()
        tiles = tiles_reference(ids, _EXPERTS)  # which compiles nothing
        if has_many_tiles:  # most of them without an expert
            more = num_programs(device, 4)
            tiles = ExpertTiles(
                F.pad(tiles.experts, (0, more), value=_EXPERTS),
                F.pad(tiles.pairs, (0, 0, 0, more), value=ids.numel()),
            )
        return Routing(ids, randn(num_rows, _TOP_K), tiles)

    pairs = []
    for routing in (routing_of(*rows) for rows in _ROWS):
        num_rows = len(routing.ids)
        x, inner = randn(num_rows, _NUM_IN).bfloat16(), randn(num_rows * _TOP_K, _NUM_IN).bfloat16()
        first = partial(experts_product, x, routing, layer, _GLU)
        down = partial(experts_product, inner, routing, layer, None)
        # By the one kernel and by the other: that for any GPU takes some outputs, here all.
        pairs += [(partial(first, range(_NUM_OUT // 2)), first)]
        pairs += [(partial(down, range(_NUM_OUT)), down)]
    return largest_difference(pairs, device)

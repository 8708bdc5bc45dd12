"""Tries at load whether the kernels for few rows of experts work on the GPU at hand: whether rows
have the same bits by them and by the kernel for any GPU. Otherwise that one has all rows.
"""

import functools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import num_programs
from . import few_rows_experts, mxfp4_few_rows
from .expert_matrix import ExpertMatrix, Glu
from .expert_tiles import ExpertTiles, tiles_reference
from .experts_product import experts_product
from .narrow_matrix import NarrowMatrix
from .routing import Routing
from .warpgroups import has_warpgroups, largest_difference, works

_TOP_K, _EXPERTS = 2, 4
# Rows, and whether there are many tiles. Each takes another form: of MXFP4 for 64, 32, 16 and 8
# rows of a tile, of plain matrices for 16 and 8; those that compile longest come first.
_MXFP4_ROWS = ((50, False), (20, False), (13, False), (7, True), (5, False))
_PLAIN_ROWS = ((13, False), (5, False))
# More stages than are copied ahead, the last one of MXFP4 not whole; of programs of two tiles of
# outputs the last one is not whole, with and without a gate.
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
        find_error = partial(_error, device, dtype, _mxfp4_matrix, _MXFP4_ROWS)
        if not works(find_error, 0.0, otherwise):
            mxfp4_few_rows.failed.add(device)


@functools.cache
@torch.inference_mode()
def try_few_rows_experts(device: torch.device, dtype: torch.dtype) -> None:
    """As `try_mxfp4_few_rows`, of plain matrices."""
    if has_warpgroups(device) and dtype.itemsize == 2:
        otherwise = "few rows are multiplied by experts in a slower kernel"
        find_error = partial(_error, device, dtype, _plain_matrix, _PLAIN_ROWS)
        if not works(find_error, 0.0, otherwise):
            few_rows_experts.failed.add(device)


def _mxfp4_matrix(generator: torch.Generator, _: torch.dtype) -> NarrowMatrix:
    def bytes_of(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(
            low, high, shape, generator=generator, dtype=torch.uint8, device=generator.device
        )

    codes = bytes_of(0, 256, _EXPERTS * _NUM_OUT, _NUM_IN // 2)
    scale = bytes_of(118, 123, _NUM_IN // 32, len(codes)).view(torch.float8_e8m0fnu)
    return NarrowMatrix("fp4", codes, scale, None, _NUM_IN, 32)


def _plain_matrix(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    shape = _EXPERTS * _NUM_OUT, _NUM_IN
    return (torch.randn(shape, generator=generator, device=generator.device) / 40).to(dtype)


def _error(
    device: torch.device,
    dtype: torch.dtype,
    make_matrix: Callable[[torch.Generator, torch.dtype], Tensor | NarrowMatrix],
    rows: tuple[tuple[int, bool], ...],
) -> float:
    """The relative difference between the same rows by both kernels."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    layer = ExpertMatrix(
        make_matrix(generator, dtype), randn(_EXPERTS * _NUM_OUT).to(dtype), _EXPERTS
    )

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
    for routing in (routing_of(*each) for each in rows):
        num_rows = len(routing.ids)
        x, inner = randn(num_rows, _NUM_IN).to(dtype), randn(num_rows * _TOP_K, _NUM_IN).to(dtype)
        first = partial(experts_product, x, routing, layer, _GLU)
        down = partial(experts_product, inner, routing, layer, None)
        # By the one kernel and by the other: that for any GPU takes some outputs, here all.
        pairs += [(partial(first, range(_NUM_OUT // 2)), first)]
        pairs += [(partial(down, range(_NUM_OUT)), down)]
    return largest_difference(pairs, device)

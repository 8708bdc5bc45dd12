"""Tries at load whether the kernels of FP8 products for Hopper GPUs work on the GPU at hand:
whether rows have the same bits by each of them as by the kernel for any GPU. If not,
`scaled_product` and experts take that one for all.

All sizes of tiles of many rows are launched, so that no request waits until one is compiled.
"""

import functools
from functools import partial

import torch
from torch import Tensor

from . import block_scaled_product, row_scaled_product
from .block_scaled_experts import tiled_activations, tiled_parts
from .block_scaled_few_rows import FEW_ROWS
from .expert_matrix import SILU, ExpertMatrix, part_of
from .expert_tiles import tiles_of
from .narrow_matrix import NarrowMatrix, narrow_matrix
from .routing import Routing
from .row_codes import RowCodes, round_rows
from .scaled_product import scaled_product
from .split_product import add_parts_reference
from .warpgroups import largest_difference, works

_MANY, _SOME, _FEW = 300, 150, 20
_GROUP = 128  # inputs, and outputs, that share a scale in blocks
_NUM_EXPERTS = 2
_NUM_OUT, _FEWER_OUT = 8192, 512  # with so many outputs tiles are wide, with so few narrow


def try_scaled_product(matrix: NarrowMatrix, dtype: torch.dtype) -> None:
    """If such kernels are for that matrix, multiply rows of `dtype` by others like it, few and
    many; if that fails, log why, and let them be for none. To be called where kernels run: in no
    capture.
    """
    if block_scaled_product.is_for(matrix):
        try_blocks(matrix.codes.device, dtype)
    if row_scaled_product.is_for(matrix):
        try_rows(matrix.codes.device, dtype)


@functools.cache
@torch.inference_mode()
def try_blocks(device: torch.device, dtype: torch.dtype) -> None:
    otherwise = "rows are multiplied by FP8 blocks in a slower kernel"
    if not works(partial(error_of_blocks, device, dtype), 0.0, otherwise):
        block_scaled_product.failed.add(device)


@functools.cache
@torch.inference_mode()
def try_rows(device: torch.device, dtype: torch.dtype) -> None:
    otherwise = "more than a few rows are multiplied by FP8 in a slower kernel"
    if not works(partial(error_of_rows, device, dtype), 0.0, otherwise):
        row_scaled_product.failed.add(device)


class _Trial:
    """Random numbers, and a matrix by which rows are multiplied in each way."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_out: int) -> None:
        self._generator, self._dtype = torch.Generator(device).manual_seed(0), dtype
        self.residual = self.randn(_MANY, num_out).to(dtype)

    def randn(self, *shape: int) -> Tensor:
        generator = self._generator
        return torch.randn(shape, generator=generator, device=generator.device)

    def _codes(self, num_rows: int, num_in: int) -> Tensor:
        return self.randn(num_rows, num_in).clamp(-4, 4).mul(100).to(torch.float8_e4m3fn)

    def matrix(self, num_out: int, num_in: int, group: int, rows: int = 1) -> NarrowMatrix:
        scale = self.randn(num_in // group, num_out // rows).abs() / 10_000
        codes = self._codes(num_out, num_in)
        return narrow_matrix("fp8", codes, scale, group=group, rows=rows, rounds_inputs=True)

    def rows(self, num_in: int, group: int, *sizes: int) -> list[RowCodes]:
        """So many rows, always the last ones of all."""
        codes = self._codes(_MANY, num_in)
        scale = self.randn(_MANY, num_in // group).abs() / 100
        return [RowCodes(codes[-n:], scale[-n:], self._dtype) for n in sizes]

    def plain(self, matrix: NarrowMatrix, bias: Tensor | None, x: RowCodes) -> Tensor:
        out = self.residual.new_empty(len(x.codes), len(matrix.codes))
        scaled_product(out, x, matrix, bias)
        return out

    def gated(self, matrix: NarrowMatrix, bias: Tensor | None, x: RowCodes) -> Tensor:
        out = self.residual.new_empty(len(x.codes), len(matrix.codes) // 2)
        scaled_product(out, x, matrix, bias, gated=True)
        return out

    def added(self, matrix: NarrowMatrix, bias: Tensor | None, splits: int, x: RowCodes) -> Tensor:
        out = self.residual[-len(x.codes) :].clone()
        scaled_product(out, x, matrix, bias, num_splits=splits, adds=True)
        return out

    def parts(self, matrix: NarrowMatrix, x: RowCodes) -> Tensor:
        """Of two shares. Shape: -> [T, 2, N]"""
        parts = x.scale.new_empty(2, len(x.codes), len(matrix.codes))
        scaled_product(parts, x, matrix, num_splits=2)
        return parts.transpose(0, 1)


def error_of_blocks(device: torch.device, dtype: torch.dtype) -> float:
    num_in, num_out = 1024, 256
    trial = _Trial(device, dtype, num_out)
    few, many = trial.rows(num_in, _GROUP, FEW_ROWS, _MANY)
    matrix, bias = trial.matrix(num_out, num_in, _GROUP, _GROUP), trial.randn(num_out).to(dtype)
    first, down = (
        ExpertMatrix(trial.matrix(_NUM_EXPERTS * out, width, _GROUP, _GROUP), None, _NUM_EXPERTS)
        for out, width in ((2 * num_out, num_in), (num_in, num_out))
    )

    def by_experts(x: RowCodes) -> Tensor:
        ids = torch.full((len(x.codes), 1), _NUM_EXPERTS - 1, dtype=torch.int32, device=device)
        weights = torch.ones(ids.shape, device=device)
        routing = Routing(ids, weights, tiles_of(ids, _NUM_EXPERTS))
        return tiled_parts(tiled_activations(x, routing, first, SILU), routing, down)[0]

    def by_their_last(x: RowCodes) -> Tensor:
        last_first, last_down = (
            part_of(layer.matrix, _NUM_EXPERTS - 1, _NUM_EXPERTS) for layer in (first, down)
        )
        assert isinstance(last_first, NarrowMatrix)
        assert isinstance(last_down, NarrowMatrix)
        assert last_down.row_format is not None
        inner = trial.gated(last_first, None, x)
        return trial.plain(last_down, None, round_rows(inner, last_down.row_format))

    def added_in_parts(x: RowCodes) -> Tensor:
        out = trial.residual[-len(x.codes) :].clone()
        add_parts_reference(out, trial.parts(matrix, x).transpose(0, 1), bias)
        return out

    gated = partial(trial.gated, matrix, bias)
    added = partial(trial.added, matrix, bias, 2)  # few rows: on any GPU
    ways = [
        [partial(gated, few), partial(gated, many)],
        [partial(added, few), partial(added, many), partial(added_in_parts, few)],
    ]
    if dtype.itemsize == 2:  # they are for no other
        ways.append([partial(by_their_last, few), partial(by_experts, many)])
    return largest_difference(ways, device, FEW_ROWS)


def error_of_rows(device: torch.device, dtype: torch.dtype) -> float:
    num_in = 1280
    trial = _Trial(device, dtype, _NUM_OUT)
    few, some, many = trial.rows(num_in, num_in, _FEW, _SOME, _MANY)
    matrix, fewer = (trial.matrix(num, num_in, num_in) for num in (_NUM_OUT, _FEWER_OUT))
    ways = (
        (partial(trial.plain, matrix, None), (few, some, many)),
        (partial(trial.plain, fewer, None), (few, many)),
        (partial(trial.gated, matrix, None), (few, some, many)),
        (partial(trial.added, matrix, None, 1), (few, many)),
        (partial(trial.added, matrix, None, 2), (few, many)),
        (partial(trial.parts, matrix), (few, some)),
    )
    calls = [[partial(way, x) for x in rows] for way, rows in ways]
    return largest_difference(calls, device, _FEW)

"""Tries at load whether `block_scaled_product`, `block_scaled_few_rows` and `block_scaled_experts`
work on the GPU at hand: whether rows have the same bits by each, and by the kernel for any GPU. If
not, `scaled_product` and experts take that one for all.
"""

import functools
from functools import partial

import torch
from torch import Tensor

from ..compiling import compile_together
from .block_scaled_experts import tiled_activations, tiled_parts
from .block_scaled_few_rows import FEW_ROWS
from .block_scaled_product import failed, is_for
from .expert_matrix import SILU, ExpertMatrix, part_of
from .expert_tiles import tiles_of
from .narrow_matrix import NarrowMatrix, narrow_matrix
from .routing import Routing
from .row_codes import RowCodes, round_rows
from .scaled_product import scaled_product
from .split_product import add_parts_reference
from .warpgroups import works

_ROWS = 300
_NUM_IN, _NUM_OUT = 1024, 256
_NUM_EXPERTS = 2
_GROUP = 128  # inputs, and outputs, that share a scale


def try_block_scaled_product(matrix: NarrowMatrix, dtype: torch.dtype) -> None:
    """If they are for that matrix, multiply few and a few hundred rows of `dtype` by another one;
    if that fails, log why, and let them be for none. To be called where kernels run: in no capture.
    """
    if is_for(matrix):
        _try(matrix.codes.device, dtype)


@functools.cache
@torch.inference_mode()
def _try(device: torch.device, dtype: torch.dtype) -> None:
    otherwise = "rows are multiplied by FP8 blocks in a slower kernel"
    if not works(partial(_error, device, dtype), 0.0, otherwise):
        failed.add(device)


def _error(device: torch.device, dtype: torch.dtype) -> float:
    """The relative difference between the same rows by several kernels."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def codes(num_rows: int, num_in: int = _NUM_IN) -> Tensor:
        return randn(num_rows, num_in).clamp(-4, 4).mul(100).to(torch.float8_e4m3fn)

    def matrix_of(num_out: int, num_in: int = _NUM_IN) -> NarrowMatrix:
        scale = randn(num_in // _GROUP, num_out // _GROUP).abs() / 10_000
        of_rows = codes(num_out, num_in)
        return narrow_matrix("fp8", of_rows, scale, group=_GROUP, rows=_GROUP, rounds_inputs=True)

    matrix = matrix_of(_NUM_OUT)
    first, down = (
        ExpertMatrix(matrix_of(_NUM_EXPERTS * num_out, num_in), None, _NUM_EXPERTS)
        for num_out, num_in in ((2 * _NUM_OUT, _NUM_IN), (_NUM_IN, _NUM_OUT))
    )
    many = RowCodes(codes(_ROWS), randn(_ROWS, _NUM_IN // _GROUP).abs() / 100, dtype)
    few = RowCodes(many.codes[-FEW_ROWS:], many.scale[-FEW_ROWS:], dtype)
    bias, residual = randn(_NUM_OUT).to(dtype), randn(_ROWS, _NUM_OUT).to(dtype)

    def gated(x: RowCodes) -> Tensor:
        out = residual.new_empty(len(x.codes), _NUM_OUT // 2)
        scaled_product(out, x, matrix, bias, gated=True)
        return out

    def added(x: RowCodes) -> Tensor:
        out = residual[-len(x.codes) :].clone()
        scaled_product(out, x, matrix, bias, num_splits=2, adds=True)  # few rows: on any GPU
        return out

    def in_parts(x: RowCodes) -> Tensor:
        parts = torch.empty(2, len(x.codes), _NUM_OUT, device=device)
        scaled_product(parts, x, matrix, num_splits=2)
        out = residual[-len(x.codes) :].clone()
        add_parts_reference(out, parts, bias)
        return out

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
        inner = residual.new_empty(len(x.codes), _NUM_OUT)
        scaled_product(inner, x, last_first, gated=True)
        out = residual.new_empty(len(x.codes), _NUM_IN)
        scaled_product(out, round_rows(inner, last_down.row_format), last_down)
        return out

    pairs = [
        (partial(gated, many), partial(gated, few)),
        (partial(added, many), partial(added, few)),
        (partial(in_parts, few), partial(added, few)),
    ]
    if dtype.itemsize == 2:  # they are for no other
        pairs.append((partial(by_experts, many), partial(by_their_last, few)))
    compile_together([call for pair in pairs for call in pair], device)
    outs = [[call().float()[-FEW_ROWS:] for call in pair] for pair in pairs]
    return max(float((a - b).norm() / b.norm()) for a, b in outs)

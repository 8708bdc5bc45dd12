"""Tries at load whether `row_scaled_product` works on the GPU at hand: whether rows have the same
bits by it as by the kernel for any GPU. If not, `scaled_product` takes that one for all.

Both sizes of its tiles are launched, so that no request waits until one is compiled.
"""

import functools
from functools import partial

import torch
from torch import Tensor

from ..compiling import compile_together
from .narrow_matrix import NarrowMatrix, narrow_matrix
from .row_codes import RowCodes
from .row_scaled_product import failed, is_for
from .scaled_product import scaled_product
from .warpgroups import works

_ROWS, _FEW = 300, 40
_NUM_IN = 1280
_NUM_OUT, _FEWER_OUT = 8192, 512  # with so many outputs tiles are wide, with so few narrow


def try_row_scaled_product(matrix: NarrowMatrix, dtype: torch.dtype) -> None:
    """If it is for that matrix, multiply few and a few hundred rows of `dtype` by another one; if
    that fails, log why, and let it be for none. To be called where kernels run: in no capture.
    """
    if is_for(matrix):
        _try(matrix.codes.device, dtype)


@functools.cache
@torch.inference_mode()
def _try(device: torch.device, dtype: torch.dtype) -> None:
    otherwise = "many rows are multiplied by FP8 in a slower kernel"
    if not works(partial(_error, device, dtype), 0.0, otherwise):
        failed.add(device)


def _error(device: torch.device, dtype: torch.dtype) -> float:
    """The relative difference between the same rows by both kernels."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def codes(num_rows: int) -> Tensor:
        return randn(num_rows, _NUM_IN).clamp(-4, 4).mul(100).to(torch.float8_e4m3fn)

    scale = randn(1, _NUM_OUT).abs() / 10_000
    matrix = narrow_matrix("fp8", codes(_NUM_OUT), scale, group=_NUM_IN, rounds_inputs=True)
    many = RowCodes(codes(_ROWS), randn(_ROWS, 1).abs() / 100, dtype)
    few = RowCodes(many.codes[-_FEW:], many.scale[-_FEW:], dtype)
    fewer = matrix._replace(codes=matrix.codes[:_FEWER_OUT], scale=scale[:, :_FEWER_OUT])
    residual = randn(_ROWS, _NUM_OUT).to(dtype)

    def plain(x: RowCodes, matrix: NarrowMatrix) -> Tensor:
        out = residual.new_empty(len(x.codes), len(matrix.codes))
        scaled_product(out, x, matrix)
        return out

    def gated(x: RowCodes) -> Tensor:
        out = residual.new_empty(len(x.codes), _NUM_OUT // 2)
        scaled_product(out, x, matrix, gated=True)
        return out

    def added(x: RowCodes, num_splits: int) -> Tensor:
        out = residual[-len(x.codes) :].clone()
        scaled_product(out, x, matrix, num_splits=num_splits, adds=True)
        return out

    ways = (
        partial(plain, matrix=matrix),
        partial(plain, matrix=fewer),
        gated,
        partial(added, num_splits=1),
        partial(added, num_splits=2),
    )
    pairs = [(partial(way, many), partial(way, few)) for way in ways]
    compile_together([call for pair in pairs for call in pair], device)
    outs = [[call().float()[-_FEW:] for call in pair] for pair in pairs]
    return max(float((a - b).norm() / b.norm()) for a, b in outs)

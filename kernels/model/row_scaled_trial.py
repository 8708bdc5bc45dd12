"""Tries at load whether `row_scaled_product` and `row_scaled_few_rows` work on the GPU at hand:
whether rows have the same bits by them as by the kernel for any GPU. If not, `scaled_product` takes
that one for all.

Both sizes of tiles of many rows are launched, so that no request waits until one is compiled.
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

_ROWS, _SOME, _FEW = 300, 150, 20
_NUM_IN = 1280
_NUM_OUT, _FEWER_OUT = 8192, 512  # with so many outputs tiles are wide, with so few narrow


def try_row_scaled_product(matrix: NarrowMatrix, dtype: torch.dtype) -> None:
    """If they are for that matrix, multiply few rows of `dtype`, some and many by another one; if
    that fails, log why, and let them be for none. To be called where kernels run: in no capture.
    """
    if is_for(matrix):
        _try(matrix.codes.device, dtype)


@functools.cache
@torch.inference_mode()
def _try(device: torch.device, dtype: torch.dtype) -> None:
    otherwise = "more than a few rows are multiplied by FP8 in a slower kernel"
    if not works(partial(_error, device, dtype), 0.0, otherwise):
        failed.add(device)


def _error(device: torch.device, dtype: torch.dtype) -> float:
    """The relative difference between the same rows by these kernels and the one for any GPU."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def codes(num_rows: int) -> Tensor:
        return randn(num_rows, _NUM_IN).clamp(-4, 4).mul(100).to(torch.float8_e4m3fn)

    scale = randn(1, _NUM_OUT).abs() / 10_000
    matrix = narrow_matrix("fp8", codes(_NUM_OUT), scale, group=_NUM_IN, rounds_inputs=True)
    many = RowCodes(codes(_ROWS), randn(_ROWS, 1).abs() / 100, dtype)
    some, few = (RowCodes(many.codes[-n:], many.scale[-n:], dtype) for n in (_SOME, _FEW))
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

    def parts(x: RowCodes) -> Tensor:
        out = x.scale.new_empty(2, len(x.codes), _NUM_OUT)
        scaled_product(out, x, matrix, num_splits=2)
        return out[1]

    ways = (
        (partial(plain, matrix=matrix), (few, some, many)),
        (partial(plain, matrix=fewer), (few, many)),
        (gated, (few, some, many)),
        (partial(added, num_splits=1), (few, many)),
        (partial(added, num_splits=2), (few, many)),
        (parts, (few, some)),
    )
    calls = [[partial(way, x) for x in rows] for way, rows in ways]
    compile_together([call for each in calls for call in each], device)
    outs = [[call().float()[-_FEW:] for call in each] for each in calls]
    return max(float((y - a).norm() / a.norm()) for a, *more in outs for y in more)

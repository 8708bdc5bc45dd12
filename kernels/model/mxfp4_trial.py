"""Tries at load whether `mxfp4_few_rows` works on the GPU at hand: whether rows have the same bits
by it and by the kernel for any GPU. If not, experts take that one for all.
"""

import functools
from functools import partial

import torch
from torch import Tensor

from ..compiling import compile_together
from .expert_matrix import ExpertMatrix, Glu
from .expert_tiles import tiles_of
from .experts_product import experts_product
from .mxfp4_few_rows import failed
from .narrow_matrix import NarrowMatrix
from .routing import Routing
from .warpgroups import has_warpgroups, works

_ROWS, _TOP_K, _EXPERTS = 20, 2, 4
_NUM_IN, _NUM_OUT = 576, 192  # no whole stages, and no whole programs
# By the one kernel and by the other: that for any GPU takes some outputs, here all.
_SOME = (None, range(_NUM_OUT))
_GLU = Glu(1.702, 7.0, 1.0)


@functools.cache
@torch.inference_mode()
def try_mxfp4_few_rows(device: torch.device, dtype: torch.dtype) -> None:
    """If it is for that GPU, multiply a few rows by it; if that fails, log why, and let it be for
    none. To be called where kernels run: in no capture.
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

    def layer_of(num_out: int) -> ExpertMatrix:
        codes = bytes_of(0, 256, _EXPERTS * num_out, _NUM_IN // 2)
        scale = bytes_of(118, 123, _NUM_IN // 32, len(codes)).view(torch.float8_e8m0fnu)
        matrix = NarrowMatrix("fp4", codes, scale, None, _NUM_IN, 32)
        return ExpertMatrix(matrix, randn(len(codes)).bfloat16(), _EXPERTS)

    ids = randn(_ROWS, _EXPERTS).topk(_TOP_K).indices.int()
    routing = Routing(ids, randn(_ROWS, _TOP_K), tiles_of(ids, _EXPERTS))
    x, inner = randn(_ROWS, _NUM_IN).bfloat16(), randn(_ROWS * _TOP_K, _NUM_IN).bfloat16()
    first, down = layer_of(2 * _NUM_OUT), layer_of(_NUM_OUT)
    pairs = [
        [partial(experts_product, x, routing, first, _GLU, some) for some in _SOME],
        [partial(experts_product, inner, routing, down, None, some) for some in _SOME],
    ]
    compile_together([call for pair in pairs for call in pair], device)
    outs = [[call().float() for call in pair] for pair in pairs]
    return max(float((a - b).norm() / b.norm()) for a, b in outs)

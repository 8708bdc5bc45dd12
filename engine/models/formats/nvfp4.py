"""NVFP4: e2m1 in groups of 16 inputs with a scale in e4m3, and a factor for the whole matrix.

Inputs stay as they are, whatever scales the checkpoint has for them.
"""

import torch

from outrider.kernels.model.narrow_matrix import NVFP4_GROUP, NarrowMatrix, narrow_matrix

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint


def read(
    tensors: Checkpoint, layer: str, *, codes: str, factor: str, divides: bool
) -> NarrowMatrix:
    """`codes`, `factor`: the ends of names. If `divides`, numbers are divided by the factor."""
    pairs = tensors.stored(f"{layer}.{codes}")  # [N, K / 2], even inputs low
    num_out, num_in = len(pairs), 2 * pairs.shape[1]
    for name in ("weight_scale", factor):
        if f"{layer}.{name}" not in tensors:
            raise UnsupportedModelError(f"{layer} has 4 bits, but no {name}")
    scale = tensors.stored(f"{layer}.weight_scale")
    expected = (num_out, num_in // NVFP4_GROUP)
    if scale.dtype != torch.float8_e4m3fn or tuple(scale.shape) != expected:
        found = f"{' x '.join(map(str, scale.shape))} of {scale.dtype}".replace("torch.", "")
        raise UnsupportedModelError(
            f"{layer}.weight_scale is {found}; in NVFP4 it is {' x '.join(map(str, expected))} "
            "of float8_e4m3fn"
        )
    if not bool((scale.float() >= 0).all()):
        raise UnsupportedModelError(f"{layer}.weight_scale has a scale that is not 0 or more")
    of_all = tensors.stored(f"{layer}.{factor}").float()
    if of_all.numel() != 1 or not bool(of_all.isfinite().all() & (of_all != 0).all()):
        raise UnsupportedModelError(f"{layer}.{factor} must be one number, finite and not 0")
    whole = (of_all.reciprocal() if divides else of_all).expand(num_out).contiguous()
    numbers = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)
    return narrow_matrix("nvfp4", numbers, scale.t(), group=NVFP4_GROUP, factor=whole)

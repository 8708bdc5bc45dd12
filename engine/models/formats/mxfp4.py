"""MXFP4 experts, as gpt-oss stores them: `name_blocks`, `name_scales` and `name_bias`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.model.e2m1 import MOST_EXPONENT
from outrider.kernels.model.expert_matrix import MXFP4_GROUP
from outrider.kernels.model.narrow_matrix import NarrowMatrix, narrow_matrix

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint, Lent, Read, check_shape
from ..expert_weights import ExpertWeights, as_experts
from ..shares import Cut
from ..weights import Layer


def reader(config: dict[str, Any]) -> Read:
    """`quant_method: mxfp4`. All layers but the experts are plain."""
    return lambda tensors, layer: None


def read_mxfp4(
    tensors: Checkpoint, name: str, shape: tuple[int, int, int], top_k: int, *, gated: bool = False
) -> Layer[ExpertWeights]:
    """The same linear layer of every expert, in MXFP4 also on a CPU; read one expert at a time.

    If `gated`, even outputs are the gate's in the file; here they come first. Ranks share outputs
    if it is gated, else inputs, and fill up their ranges with zeros. Shape: [E, N, K].
    Raises UnsupportedModelError or ValueError naming a tensor that is missing or not as it must be.
    """
    tensors.has_quantised = True
    if tensors.dtype == torch.float16:
        raise UnsupportedModelError("float16 cannot hold every number of MXFP4; take bfloat16")
    if not tensors.keeps_narrow:
        tensors.warn_once(
            "its experts are unpacked one at a time in every pass, since only a GPU multiplies by "
            "them as they are: this takes no more memory, but much time"
        )
    num_experts, num_out, num_in = shape
    _check_stored(tensors, name, shape)
    codes, scale = None, None
    for expert in range(num_experts):
        packed, exponent = _of_one_expert(tensors, name, expert, num_out, num_in, gated=gated)
        if codes is None or scale is None:
            codes = packed.new_empty(num_experts, *packed.shape)
            scale = exponent.new_empty(num_experts, *exponent.shape)
        codes[expert], scale[expert] = packed, exponent
    assert codes is not None
    assert scale is not None
    matrix = NarrowMatrix(
        kind="fp4",
        codes=codes.flatten(0, 1),
        scale=scale.flatten(0, 1).t().contiguous().view(torch.float8_e8m0fnu),
        zero=None,
        num_in=num_in,
        group=MXFP4_GROUP,
    )
    weights = as_experts(matrix, num_experts, top_k, tensors.dtype)

    def as_in_modules() -> list[Tensor]:
        whole = weights.dequantised().view(num_experts, 2 if gated else 1, -1, num_in)
        return [whole.permute(0, 3, 2, 1).flatten(2)]

    tensors.lent.append(Lent([name], as_in_modules))
    offsets = _offsets(tensors, f"{name}_bias", num_out, gated=gated)
    return Layer(weights, offsets.flatten(), _cut(gated=gated).axis)


def _cut(*, gated: bool) -> Cut:
    return Cut("outputs" if gated else "inputs")


def _check_stored(tensors: Checkpoint, name: str, shape: tuple[int, int, int]) -> None:
    """Raises as read_mxfp4 does. `shape` is that of a rank's share."""
    num_experts, num_out, num_in = shape
    blocks, scales, bias = (f"{name}_{part}" for part in ("blocks", "scales", "bias"))
    if num_in % (2 * MXFP4_GROUP):
        raise UnsupportedModelError(f"{name} has {num_in} inputs, no multiple of {2 * MXFP4_GROUP}")
    num_stored, num_groups = num_out, num_in // MXFP4_GROUP
    if tensors.share.size > 1 and scales in tensors:
        num_stored, num_groups = tensors.view(scales).shape[1:]
    for tensor, expected in (
        (blocks, (num_experts, num_stored, num_groups, MXFP4_GROUP // 2)),
        (scales, (num_experts, num_stored, num_groups)),
        (bias, (num_experts, num_stored)),
    ):
        if tensor not in tensors:
            raise UnsupportedModelError(f"there is no {tensor}")
        check_shape(tensor, tensors.view(tensor).shape, expected)
        if tensor != bias and tensors.view(tensor).dtype != torch.uint8:
            raise UnsupportedModelError(f"{tensor} is not of dtype uint8")


def _of_one_expert(
    tensors: Checkpoint, name: str, expert: int, num_out: int, num_in: int, *, gated: bool
) -> tuple[Tensor, Tensor]:
    """The codes of `NarrowMatrix`, and exponents that are 127 too large. Shape: .., [N, K / 32]

    Raises UnsupportedModelError if an exponent is too large.
    """
    pairs, exponent = (
        _filled(
            tensors.share.of(tensors.part(stored, expert), _cut(gated=gated)),
            num_out,
            num_in // MXFP4_GROUP,
        )
        for stored in (f"{name}_blocks", f"{name}_scales")
    )  # [N, K / 32, 16], even inputs low, and [N, K / 32]
    if gated:
        pairs = torch.cat((pairs[::2], pairs[1::2]))
        exponent = torch.cat((exponent[::2], exponent[1::2]))
    if (most := int(exponent.max())) > MOST_EXPONENT:
        raise UnsupportedModelError(
            f"{name}_scales has an exponent of {most}; up to {MOST_EXPONENT} are served"
        )
    numbers = torch.stack((pairs & 15, pairs >> 4), 3).view(num_out, num_in)
    plain = exponent.view(torch.float8_e8m0fnu).float()
    return narrow_matrix("fp4", numbers, plain.t(), group=MXFP4_GROUP).codes, exponent


def _offsets(tensors: Checkpoint, bias: str, num_out: int, *, gated: bool) -> Tensor:
    """What is added to the outputs of each expert. Shape: [E, N]"""
    if gated:
        offsets = tensors.tensor(bias, cut=Cut("outputs", lead=1))
        offsets = F.pad(offsets, (0, num_out - offsets.shape[1]))
    else:  # of a sum over ranks, to which one of them adds it
        offsets = tensors.tensor(bias).mul_(tensors.share.rank == 0)
    tensors.tensors[bias] = offsets  # as transformers' module has it, for the comparison
    return torch.cat((offsets[:, ::2], offsets[:, 1::2]), 1) if gated else offsets


def _filled(part: Tensor, num_out: int, num_groups: int) -> Tensor:
    """Followed by zeros, up to this size. Shape: [N, groups, ..]"""
    of_groups = (0, num_groups - part.shape[1], 0, num_out - part.shape[0])
    return F.pad(part, (0, 0) * (part.ndim - 2) + of_groups)

"""MXFP4 experts, as gpt-oss stores them: `name_blocks`, `name_scales` and `name_bias`."""

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.model.e2m1 import MOST_EXPONENT
from outrider.kernels.model.expert_matrix import GROUP, ExpertMatrix, expert_of
from outrider.kernels.model.narrow_matrix import NarrowMatrix, narrow_matrix

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint, Lent, Read, check_shape


def reader(config: dict[str, Any]) -> Read:
    """`quant_method: mxfp4`. All layers but the experts are plain."""
    return lambda tensors, layer: None


def read_experts(
    tensors: Checkpoint, name: str, shape: tuple[int, int, int], *, interleaved: bool = False
) -> ExpertMatrix:
    """The same linear layer of every expert, in MXFP4 also on a CPU; read one expert at a time.

    With `interleaved`, even outputs are the gate's, and come first. Shape: [E, N, K].
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
    blocks, scales, bias = (f"{name}_{part}" for part in ("blocks", "scales", "bias"))
    if num_in % (2 * GROUP):
        raise UnsupportedModelError(f"{name} has {num_in} inputs, no multiple of {2 * GROUP}")
    num_groups = num_in // GROUP
    for tensor, expected in (
        (blocks, (num_experts, num_out, num_groups, GROUP // 2)),
        (scales, (num_experts, num_out, num_groups)),
        (bias, (num_experts, num_out)),
    ):
        if tensor not in tensors:
            raise UnsupportedModelError(f"there is no {tensor}")
        check_shape(tensor, tensors.view(tensor).shape, expected)
        if tensor != bias and tensors.view(tensor).dtype != torch.uint8:
            raise UnsupportedModelError(f"{tensor} is not of dtype uint8")
    codes, scale = None, None
    for expert in range(num_experts):
        pairs = tensors.part(blocks, expert)  # [N, K / 32, 16], even inputs low
        exponent = tensors.part(scales, expert)  # [N, K / 32], 127 too large
        if interleaved:
            pairs = torch.cat((pairs[::2], pairs[1::2]))
            exponent = torch.cat((exponent[::2], exponent[1::2]))
        numbers = torch.stack((pairs & 15, pairs >> 4), 3).view(num_out, num_in)
        if (most := int(exponent.max())) > MOST_EXPONENT:
            raise UnsupportedModelError(
                f"{scales} has an exponent of {most}; up to {MOST_EXPONENT} are served"
            )
        plain = exponent.view(torch.float8_e8m0fnu).float()
        packed = narrow_matrix("fp4", numbers, plain.t(), group=GROUP).codes
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
        group=GROUP,
    )
    offsets = tensors.tensor(bias)
    if interleaved:
        offsets = torch.cat((offsets[:, ::2], offsets[:, 1::2]), 1)
    layer = ExpertMatrix(matrix, offsets.flatten(), num_experts)
    tensors.lent.append(Lent([name], lambda: [_as_stored(layer, tensors.dtype, interleaved)]))
    return layer


def _as_stored(layer: ExpertMatrix, dtype: torch.dtype, interleaved: bool) -> Tensor:
    """The matrices as transformers' modules have them: transposed. Shape: [E, K, N]."""
    num_in, num_out = layer.matrix.num_in, layer.num_out
    whole = layer.bias.new_empty(layer.num_experts, num_in, num_out, dtype=dtype)
    for i, transposed in enumerate(whole):
        matrix, _ = expert_of(layer, i, dtype)
        if interleaved:
            matrix = matrix.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        transposed.copy_(matrix.t())
    return whole

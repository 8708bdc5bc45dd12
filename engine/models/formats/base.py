"""Tools for reading quantised layers."""

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.model.narrow_matrix import Kind, NarrowMatrix, narrow_matrix

from ..checkpoint import Checkpoint, check_shape


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """The numbers of `bits` bits in int32 words, the lowest first, along a dimension.

    Raises ValueError if the words have another width, as GPTQModel's `pack_dtype` may say.
    Shape: [.., W, ..] -> [.., W * 32 / bits, ..] uint8
    """
    if words.dtype != torch.int32:
        raise ValueError(f"its numbers are packed into {words.dtype}; words of int32 are read")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    words = words.movedim(dim, -1).contiguous()
    numbers = torch.empty(*words.shape, len(shifts), dtype=torch.uint8, device=words.device)
    for i, shift in enumerate(shifts):  # one by one, since all together take much memory
        numbers[..., i] = (words >> shift) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


def signed(numbers: Tensor) -> Tensor:
    """0 to 255 as -128 to 127. Shape: any, uint8 -> int8."""
    return (numbers ^ 128).view(torch.int8)


def group_of(num_in: int, num_groups: int) -> int:
    """Inputs that share a scale. Raises ValueError if groups differ in size."""
    if num_in % num_groups:
        raise ValueError(f"{num_in} inputs are in {num_groups} groups")
    return num_in // num_groups


def matrix_of_integers(
    tensors: Checkpoint, index: str, codes: Tensor, bits: int, scale: Tensor, **parts: Any
) -> NarrowMatrix:
    """A matrix of 4 or 8 bits; the tensor `index`, if there is one, has the group of each input.

    Raises ValueError if groups differ in size.
    Shape: codes [N, K] uint8, index [K]; scale and `parts` as in narrow_matrix.
    """
    group = group_of(codes.shape[1], len(scale))
    order = None
    if index in tensors:
        groups = tensors.stored(index)
        check_shape(index, groups.shape, codes.shape[1:])
        by_group = torch.argsort(groups, stable=True)
        inputs = torch.arange(len(by_group), device=by_group.device)
        if not torch.equal(groups[by_group].long(), inputs // group):
            raise ValueError(f"its groups are not of {group} inputs each")
        if not torch.equal(by_group, inputs):
            order, codes = by_group, codes[:, by_group]
    if bits == 8:
        codes = signed(codes)
    kind: Kind = "int4" if bits == 4 else "int8"
    return narrow_matrix(kind, codes.contiguous(), scale, group=group, order=order, **parts)

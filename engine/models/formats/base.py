"""Tools for reading quantised layers."""

import torch
from torch import Tensor


class UnsupportedFormatError(ValueError):
    """The layers are in a format that is not served; the message says which."""


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """The numbers of `bits` bits in int32 words, the lowest first, along a dimension.

    Shape: [.., W, ..] -> [.., W * 32 / bits, ..] uint8
    """
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
    """Inputs that share a scale. Raises UnsupportedFormatError if groups differ in size."""
    if num_in % num_groups:
        raise UnsupportedFormatError(f"{num_in} inputs are in {num_groups} groups")
    return num_in // num_groups


def order_of(group_index: Tensor, group: int) -> Tensor | None:
    """Inputs in the order of their groups; None if that is their own.

    Raises UnsupportedFormatError if groups differ in size. Shape: [K] -> [K]
    """
    order = torch.argsort(group_index, stable=True)
    inputs = torch.arange(len(order), device=order.device)
    if not torch.equal(group_index[order].long(), inputs // group):
        raise UnsupportedFormatError(f"its groups are not of {group} inputs each")
    return None if torch.equal(order, inputs) else order

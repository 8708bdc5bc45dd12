"""Matrices in the layout of the compiled layers: tiles of 32 outputs.

For each group of inputs, a tile holds a scale (and an offset) of each output, and then the codes.
Those of 4 or 8 bits come as four bytes of 16 outputs after each other, each byte of one input. So
four inputs of 16 outputs are one operand of a processor's 8-bit products, and are unpacked to float
without shuffles. If codes have 4 bits, a byte's upper half belongs to the output 16 further on.
Codes in float32 come one input after another.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

TILE, BLOCK = 32, 32  # outputs, inputs
LANES, QUAD = 16, 4  # outputs whose codes lie together, for so many inputs


class Layout(IntEnum):
    """How codes are stored; the numbers are those of PRODUCTS in products.h."""

    FOUR_HALF = 0  # 4 bits, unsigned; scale and offset in float16, of 32 inputs
    FOUR_FLOAT = 1  # in float32
    EIGHT_HALF = 2  # 8 bits, signed; scale in float16, of 32 inputs
    EIGHT_FLOAT = 3  # in float32, of 16 inputs
    PLAIN = 4  # float32

    @property
    def bits(self) -> int:
        return (4, 4, 8, 8, 32)[self]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 16 if self == Layout.EIGHT_FLOAT else BLOCK

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self in (Layout.FOUR_HALF, Layout.EIGHT_HALF) else torch.float32


class Codes(NamedTuple):
    """w[n, k] = scale[n, k // group] * codes[n, k] + offset[n, k // group]."""

    codes: Tensor  # [N, K] uint8 of 4 bits, int8, or float32
    scale: Tensor | None = None  # [N, K / group]
    offset: Tensor | None = None  # [N, K / group]

    def dequantised(self) -> Tensor:
        """Shape: [N, K] float32."""
        if self.scale is None:
            return self.codes.float()
        group = self.codes.shape[1] // self.scale.shape[1]
        parts: Tensor = self.codes.float().unflatten(1, (-1, group))
        parts = parts * self.scale.float()[..., None]
        if self.offset is not None:
            parts += self.offset.float()[..., None]
        return parts.flatten(1)


class PackedTiles(NamedTuple):
    """A matrix [N, K] in tiles."""

    data: Tensor  # [tiles, groups, bytes] uint8
    layout: Layout
    shape: tuple[int, int]


def pack_tiles(matrix: Codes, layout: Layout) -> PackedTiles:
    """Pack into tiles; the last one is padded with zeros. K must be a multiple of 32."""
    num_out, num_in = matrix.codes.shape
    assert num_in % BLOCK == 0, f"{num_in} inputs are no multiple of {BLOCK}"
    num_groups = num_in // layout.group
    parts = []
    if layout != Layout.PLAIN:
        for numbers in (matrix.scale, matrix.offset):
            if numbers is not None:
                tiled = _tiled(numbers.to(layout.scale_dtype))  # [tiles, TILE, groups]
                parts.append(tiled.transpose(1, 2).contiguous().view(torch.uint8))
    codes = _tiled(matrix.codes).unflatten(2, (num_groups, layout.group))
    if layout == Layout.PLAIN:
        codes = codes.permute(0, 2, 3, 1)
    else:
        codes = codes.unflatten(1, (2, LANES)).unflatten(-1, (-1, QUAD))
        # [tiles, groups, quads, 2, LANES, QUAD], from [tiles, 2, LANES, groups, quads, QUAD]
        codes = codes.permute(0, 3, 4, 1, 2, 5)
        if layout.bits == 4:
            codes = codes[:, :, :, :1] | codes[:, :, :, 1:] << 4
    parts.append(codes.contiguous().view(torch.uint8).flatten(2))
    return PackedTiles(torch.cat(parts, 2), layout, (num_out, num_in))


def _tiled(rows: Tensor) -> Tensor:
    """Shape: [N, ...] -> [tiles, TILE, ...]."""
    missing = -len(rows) % TILE
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    tiles: Tensor = rows.unflatten(0, (-1, TILE))
    return tiles

"""Linear layers whose rows come out the same to the bit, however many are computed together.

Our own products sum in one order for any number of rows. The library's often sum in the same one,
and are faster for many rows; but which one it runs, and whether that splits the sum, hangs on how
many rows there are. So at which row counts it agrees with ours is found out at load, and it gets
rows in such counts alone. What is beside a product goes row by row: its norm is applied first, and
a gate takes both halves as they are rounded.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .product import num_splits_of, product, product_parts
from .rms_norm import Norm, rms_norm
from .silu_mul import silu_mul
from .split_product import add_parts, library_parts

_MAX_OWN_ROWS = 32  # up to which ours are not behind
# From here on rows take longer than the weights: they may be computed in several goes.
_MANY_ROWS = 512
_LIBRARY_ROWS = (
    *(4096, 3072, 2048, 1536),
    *range(1024, _MANY_ROWS, -64),
    *range(_MANY_ROWS, _MAX_OWN_ROWS, -8),
)
_MAX_OUTPUTS = 1 << 27  # that are compared at load
# Our blocks are made for so many rows; if one of them summed otherwise, a GPU would be unfit.
_OWN_ROWS = (1, 17, 33, 65, 257)


class LibraryRows(NamedTuple):
    """At how many rows the library sums as our products do, in descending order."""

    plain: tuple[int, ...]
    in_parts: tuple[int, ...]


@torch.inference_mode()
def library_rows(weight: Tensor, bias: Tensor | None) -> LibraryRows:
    """Find out where the library may multiply by this weight. Shape: weight [N, K], bias [N].

    Raises ValueError if not even our own products sum alike, with these weights on this device.
    """
    if weight.element_size() != 2:
        raise ValueError(f"its weights are {weight.dtype}: rows of 16 bits alone are summed alike")
    return _library_rows(weight.shape, weight.dtype, weight.device, bias is not None)


@functools.cache
def _library_rows(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, has_bias: bool
) -> LibraryRows:
    num_out, num_in = shape
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    weight, bias = randn(num_out, num_in), randn(num_out) if has_bias else None
    splits = num_splits_of(weight)
    # Where rows lie otherwise in memory than here, the library might run something else.
    is_aligned = num_out % 8 == num_in % (8 * splits) == 0
    counts = [n for n in _LIBRARY_ROWS if is_aligned and n * num_out * splits <= _MAX_OUTPUTS]
    x = randn(max((*counts, *_OWN_ROWS)), num_in)
    plain, parts = product(x, weight, bias), product_parts(x, weight, splits)
    for n in _OWN_ROWS:
        if not (
            torch.equal(product(x[:n], weight, bias), plain[:n])
            and torch.equal(product_parts(x[-n:], weight, splits), parts[:, -n:])
        ):
            raise ValueError(f"{torch.cuda.get_device_name(device)} sums {n} rows in another order")
    return LibraryRows(
        tuple(n for n in counts if torch.equal(_library_product(x[:n], weight, bias), plain[:n])),
        tuple(n for n in counts if torch.equal(library_parts(x[:n], weight, splits), parts[:, :n])),
    )


def same_bits_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    library: LibraryRows,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As `linear`: x W^T + b, of x normalised first, or silu(gate) * up of its two halves."""
    if norm is not None:
        x = rms_norm(x, norm)
    if out is None:
        out = x.new_empty(len(x), len(weight) // 2 if gated else len(weight))
    for rows, is_library in _blocks(len(x), library.plain):
        if not is_library:
            product(x[rows], weight, bias, gated=gated, out=out[rows])
        elif gated:
            silu_mul(_library_product(x[rows], weight, bias), out[rows])
        else:
            _library_product(x[rows], weight, bias, out[rows])
    return out


def add_same_bits_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    library: LibraryRows,
    *,
    norm: Norm | None = None,
) -> Tensor | None:
    """As `add_linear`: add x W^T + b to the residual, in place; returns the sum normalised, if that
    is asked for.
    """
    num_splits = num_splits_of(weight)
    normed = torch.empty_like(residual) if norm is not None else None
    for rows, is_library in _blocks(len(x), library.in_parts):
        make_parts = library_parts if is_library else product_parts
        parts = make_parts(x[rows], weight, num_splits)
        add_parts(residual[rows], parts, norm, bias, None if normed is None else normed[rows])
    return normed


def _blocks(num_rows: int, library_rows: tuple[int, ...]) -> Iterator[tuple[slice, bool]]:
    """Rows to multiply at once, and whether the library does."""
    start = 0
    while (left := num_rows - start) > _MAX_OWN_ROWS:
        size = next((n for n in library_rows if n <= left), 0)
        if size < min(left, _MANY_ROWS):
            break  # few rows in several goes would read the weights as often
        yield slice(start, start + size), True
        start += size
    if start < num_rows:
        yield slice(start, num_rows), False


def _library_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)

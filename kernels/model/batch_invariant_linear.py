"""Linear layers whose rows have the same bits, however many rows are computed together.

Our own products sum in one order for any number of rows. The library is faster for many rows, and
often sums in the same order; but which kernel it picks, and whether that splits the sum, depends on
the number of rows. So at load we find out for which numbers of rows it agrees with ours, and then
give it rows in blocks of these sizes only. The rest is done row by row: the norm comes before the
product, and the gate takes both halves after they are rounded. On a Hopper GPU many rows are gated,
or added up, within `many_rows_product`.
"""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiling import compile_together
from .few_outputs_product import has_few_outputs
from .many_rows_product import is_ahead, is_for, many_rows_product
from .product import parts_of, product, product_parts
from .rms_norm import Norm, rms_norm
from .silu_mul import silu_mul
from .split_product import add_parts, add_parts_reference, library_parts
from .warpgroups import works

_MAX_OWN_ROWS = 32  # up to here our own product is at least as fast
# From here on computing takes longer than reading the weights, so they may be read several times.
_MANY_ROWS = 512
_LIBRARY_ROWS = (
    *(4096, 3072, 2048, 1536),
    *range(1024, _MANY_ROWS, -64),
    *range(_MANY_ROWS, _MAX_OWN_ROWS, -8),
)
_MAX_OUTPUTS = 1 << 27  # bounds the memory of the comparison at load
# Compared for each number of rows. Rounded to 16 bits, one sum of thousands shows another order: of
# 32 outputs of 64 rows, maybe none.
_MIN_OUTPUTS = 1 << 17
# Numbers of rows for which our product takes different block sizes; they must all sum alike.
_OWN_ROWS = (1, 17, 33, 65, 257, 513)


class LibraryRows(NamedTuple):
    """Numbers of rows for which the library sums as our products do, in descending order."""

    plain: tuple[int, ...]
    in_parts: tuple[int, ...]
    has_many: bool = False  # whether `many_rows_product` works, and sums as our products do, too


def own_products(weight: Tensor, bias: Tensor | None) -> list[Callable[[], Tensor]]:
    """Calls that launch all that `library_rows` does of our own kernels, to compile them ahead.

    Shape: weight [N, K], bias [N].
    """
    x, splits = weight.new_empty(max(_OWN_ROWS), weight.shape[1]), parts_of(weight)
    whole = [partial(product, x[:n], weight, bias) for n in _OWN_ROWS]
    return [*whole, *(partial(product_parts, x[:n], weight, splits) for n in _OWN_ROWS)]


@torch.inference_mode()
def library_rows(weight: Tensor, bias: Tensor | None) -> LibraryRows:
    """Find out for how many rows the library may multiply by this weight.

    Raises ValueError if not even our own products sum alike, for these weights on this device.
    Shape: weight [N, K], bias [N].
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
    splits = parts_of(weight)
    # With another alignment of the rows, the library might run another kernel.
    is_aligned = num_out % 8 == num_in % (8 * splits) == 0
    counts = [n for n in _LIBRARY_ROWS if is_aligned and n * num_out * splits <= _MAX_OUTPUTS]
    x = randn(max((*counts, *_OWN_ROWS)), num_in)
    compile_together(own_products(weight, bias), device)
    plain, parts = product(x, weight, bias), product_parts(x, weight, splits)
    few = has_few_outputs(weight)  # summed by shares of the inputs, as the library never does
    for n in _OWN_ROWS:
        if not (
            torch.equal(product(x[:n], weight, bias), plain[:n])
            and torch.equal(product_parts(x[-n:], weight, splits), parts[:, -n:])
        ):
            raise ValueError(f"{torch.cuda.get_device_name(device)} sums {n} rows in another order")

    def is_alike(num_rows: int) -> bool:
        num_blocks = min(len(x) // num_rows, -(-_MIN_OUTPUTS // (num_rows * num_out)))
        blocks = zip(x.split(num_rows), plain.split(num_rows), strict=True)
        return all(
            torch.equal(_library_product(rows, weight, bias), ours)
            for rows, ours in islice(blocks, num_blocks)
        )

    return LibraryRows(
        () if few else tuple(n for n in counts if is_alike(n)),
        tuple(n for n in counts if torch.equal(library_parts(x[:n], weight, splits), parts[:, :n])),
        bias is None and not few and _has_many(x, weight, plain, parts),
    )


def _has_many(x: Tensor, weight: Tensor, plain: Tensor, parts: Tensor) -> bool:
    """Whether `many_rows_product` works, with the bits of these products and their parts."""
    shape = " x ".join(map(str, weight.shape))
    otherwise = f"prompts are multiplied by {shape} weights in more launches"
    find_error = partial(_error_of_many_rows, x, weight, plain, parts)
    return is_for(weight, num_splits=len(parts)) and works(find_error, 0.0, otherwise)


def _error_of_many_rows(x: Tensor, weight: Tensor, plain: Tensor, parts: Tensor) -> float:
    """What part of its results differs from them."""
    x, parts = x[:-1], parts[:, :-1]  # the last tile is not full
    expected = silu_mul(plain[:-1]), torch.ones_like(plain[:-1])
    add_parts_reference(expected[1], parts)
    found = torch.empty_like(expected[0]), torch.ones_like(expected[1])
    calls = [
        partial(many_rows_product, found[0], x, weight, gated=True),
        partial(many_rows_product, found[1], x, weight, num_splits=len(parts)),
    ]
    compile_together(calls, x.device)
    for call in calls:
        call()
    # Not by how much: numbers of 16 bits may have become infinite.
    return max(float((a != b).float().mean()) for a, b in zip(found, expected, strict=True))


def batch_invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    library: LibraryRows,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Like `linear`: norm(x) W^T + b; with `gated`, silu(first half) * second half of that."""
    if norm is not None:
        x = rms_norm(x, norm)
    if out is None:
        out = x.new_empty(len(x), len(weight) // 2 if gated else len(weight))
    if gated and library.has_many and is_ahead(x, weight):
        many_rows_product(out, x, weight, gated=True)
        return out
    for rows, is_library in _blocks(len(x), library.plain):
        if not is_library:
            product(x[rows], weight, bias, gated=gated, out=out[rows])
        elif gated:
            silu_mul(_library_product(x[rows], weight, bias), out[rows])
        else:
            _library_product(x[rows], weight, bias, out[rows])
    return out


def add_batch_invariant_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    library: LibraryRows,
    *,
    norm: Norm | None = None,
) -> Tensor | None:
    """Like `add_linear`: add x W^T + b to the residual in place; returns norm(residual), or None
    without a norm, or if the norm rounds.
    """
    num_splits = parts_of(weight)
    if norm is not None and norm.rounds is not None:
        norm = None  # the next layer applies it: blocks would each have rows of their own
    if library.has_many and is_ahead(x, weight) and residual.is_contiguous():
        many_rows_product(residual, x, weight, num_splits=num_splits)
        return None if norm is None else rms_norm(residual, norm)
    normed = torch.empty_like(residual) if norm is not None else None
    for rows, is_library in _blocks(len(x), library.in_parts):
        make_parts = library_parts if is_library else product_parts
        parts = make_parts(x[rows], weight, num_splits)
        add_parts(residual[rows], parts, norm, bias, None if normed is None else normed[rows])
    return normed


def _blocks(num_rows: int, library_rows: tuple[int, ...]) -> Iterator[tuple[slice, bool]]:
    """Blocks of rows, and for each whether the library multiplies it."""
    start = 0
    while (left := num_rows - start) > _MAX_OWN_ROWS:
        size = next((n for n in library_rows if n <= left), 0)
        if size < min(left, _MANY_ROWS):
            break  # several blocks of few rows would read the weights as many times
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

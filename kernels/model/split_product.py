"""A product that is added to a residual, and the RMSNorm of the sum:

    y += x W^T,     z = rmsnorm(y)

A product of many inputs and few outputs keeps few multiprocessors busy, or reads x again and again
in small tiles. The library splits some such sums over K, and adds the parts in a launch of its own.
Here they are always split. The kernel that adds the parts has each row whole, so it can normalise
it as well.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .product import is_ahead, parts_of, product_parts
from .rms_norm import Norm, block_of_row, normed_row, numbers_of_row, rounded
from .row_codes import Rows, empty_rows, places_of, store_codes

_MIN_LARGE_WEIGHTS = 1 << 24


class PeerParts(NamedTuple):
    """Parts in the memories of several GPUs, of the residual's dtype and shape.

    Each rank computes one. The program that adds a row tells the other ranks that its part is
    there, and waits for theirs: nothing else is launched for it. Programs of a row meet as often on
    all ranks, so they count their meetings.
    """

    addresses: Tensor  # [ranks] int64
    flags: Tensor  # [ranks] int64, addresses of [ranks, most rows] int32: meetings of each with it
    meetings: Tensor  # [most rows] int32, of this rank
    rank: int
    most_tries: int = 0  # to find another rank there, in a trial: it may not come; 0: no limit


def can_split(x: Tensor, weight: Tensor) -> bool:
    return is_ahead(x, weight) or weight.shape[1] % (8 * _num_library_splits(weight)) == 0


def add_split_product(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None
) -> Rows | None:
    """Add x W^T + b to the residual in place; returns norm(residual), or None without a norm.

    Shape: residual [T, N] dense, x [T, K], rows dense, weight [N, K], bias [N]; `can_split` must
    hold.
    """
    if is_ahead(x, weight):
        parts = product_parts(x, weight, parts_of(weight))
    else:
        parts = library_parts(x, weight, _num_library_splits(weight))
    return add_parts(residual, parts, norm, bias)


def library_parts(x: Tensor, weight: Tensor, num_splits: int) -> Tensor:
    """`product_parts` by the library, which may sum in another order."""
    a = x.unflatten(1, (num_splits, -1)).transpose(0, 1)
    b = weight.unflatten(1, (num_splits, -1)).permute(1, 2, 0)
    if x.is_cuda and x.element_size() == 2:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _num_library_splits(weight: Tensor) -> int:
    return 2 if weight.numel() >= _MIN_LARGE_WEIGHTS else 4  # measured on an H200


def add_parts(
    residual: Tensor,
    parts: Tensor | PeerParts,
    norm: Norm | None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    num_real: Tensor | None = None,
) -> Rows | None:
    """Add the parts, in order, and then the bias to the residual in place.

    Returns norm(residual), rounded if the norm rounds, or None without a norm. `out` takes it if it
    is given and the norm does not round. `num_real`: how many rows have parts (None: all).
    Parts are summed in float32.
    Shape: residual [T, N], rows dense, out [T, N] dense, parts [splits, T, N] of any dtype,
    bias [N], num_real [1] -> [T, N] or None
    """
    num_rows, width = residual.shape
    flags = meetings = None
    rank = most_rows = most_tries = 0
    if isinstance(parts, PeerParts):
        parts, flags, meetings, rank, most_tries = parts
        most_rows = len(meetings)
        assert num_rows <= most_rows
    else:
        assert parts.shape[1:] == residual.shape
    assert residual.stride(1) == 1
    format_ = norm.rounds if norm is not None else None
    rows = empty_rows(residual, format_, out) if norm is not None else None
    _add_parts_kernel[(num_rows,)](
        residual,
        parts_ptr=parts, bias_ptr=bias, norm_ptr=norm.weight if norm is not None else None,
        eps=norm.eps if norm is not None else 0.0, num_real_ptr=num_real, num_rows=num_rows,
        residual_stride=residual.stride(0), flags_ptr=flags, meetings_ptr=meetings, rank=rank,
        NUM_IN=width, **places_of(rows, format_), SPLITS=len(parts), MOST_ROWS=most_rows,
        MOST_TRIES=most_tries, **block_of_row(width if format_ is None else format_.width),
        **dependent_launch(residual.device),
    )  # fmt: skip
    return rows


def add_parts_reference(residual: Tensor, parts: Tensor, bias: Tensor | None = None) -> None:
    """`add_parts` without a norm. Shape: residual [T, N], parts [splits, T, N], bias [N]"""
    total = residual.float()
    for part in parts.unbind():
        total = total + part
    residual.copy_(total if bias is None else total + bias)


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _add_parts_kernel(
    residual_ptr,  # [num_rows, NUM_IN]
    out_ptr,  # [num_rows, NUM_IN], or None
    codes_ptr,  # [num_rows, WIDTH] or None
    codes_scale_ptr,  # [num_rows, groups] or None
    parts_ptr,  # [SPLITS, num_rows, NUM_IN], or [SPLITS] addresses of such
    bias_ptr,  # [NUM_IN] or None
    norm_ptr,  # [NUM_IN] or None
    eps,
    num_real_ptr,  # [1], or None
    num_rows,
    residual_stride,
    flags_ptr,  # [SPLITS] addresses of [SPLITS, MOST_ROWS] on every rank, or None
    meetings_ptr,  # [MOST_ROWS], or None
    rank,
    NUM_IN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    MOST_TRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: one row."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    n = numbers_of_row(BLOCK)
    mask = n < NUM_IN
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + n, mask=mask, other=0.0).to(tl.float32)
    at = row * NUM_IN + n
    has_parts = mask
    if num_real_ptr is not None:  # written before the pass
        has_parts = mask & (row < tl.load(num_real_ptr))
    wait_for_inputs(DEPENDENT)
    # The first part is loaded last, and all volatile, so the order stands: to save registers, ptxas
    # would load many one after another, each once some before it are added.
    ORDERED: tl.constexpr = SPLITS > 2
    residual_at = residual_ptr + row * residual_stride + n
    y = tl.load(residual_at, mask=mask, other=0.0, volatile=ORDERED).to(tl.float32)
    BY_ADDRESS: tl.constexpr = MOST_ROWS > 0
    if BY_ADDRESS:
        _meet(flags_ptr, meetings_ptr, rank, SPLITS, MOST_ROWS, MOST_TRIES)
    stride = num_rows.to(tl.int64) * NUM_IN
    parts = ()
    for split in tl.static_range(SPLITS - 1, -1, -1):
        if BY_ADDRESS:
            first = tl.load(parts_ptr + split).to(tl.pointer_type(residual_ptr.dtype.element_ty))
            first = tl.multiple_of(first, 16)
        else:
            first = parts_ptr + split * stride
        part = tl.load(first + at, mask=has_parts, other=0.0, volatile=ORDERED)
        parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
    for split in tl.static_range(SPLITS):
        y += parts[SPLITS - 1 - split].to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    stored = rounded(y, residual_ptr.dtype.element_ty)
    tl.store(residual_at, stored, mask=mask)
    if norm_ptr is not None:
        y = stored.to(tl.float32)  # normalise what was stored
        z = rounded(normed_row(y, norm, eps, NUM_IN), stored.dtype)
        if out_ptr is not None:
            tl.store(out_ptr + at, z, mask=mask)
        if codes_ptr is not None:
            z = z.to(tl.float32)
            store_codes(z, n, row, 0, codes_ptr, codes_scale_ptr, NUM_IN, WIDTH, GROUP, BLOCK)


@triton.jit
def _meet(
    flags_ptr,
    meetings_ptr,
    rank,
    RANKS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    MOST_TRIES: tl.constexpr,
):
    """Wait for the program of the same row on all other ranks, whose parts are there then.

    Counts of meetings wrap after 2^31, within days. Programs that do not fit on a GPU at once must
    start in the same order on all, as they do: by their number.
    """
    row = tl.program_id(0)
    meeting = tl.load(meetings_ptr + row) + 1
    # Only the others: a release waits until all memory has what this rank has written.
    for i in tl.static_range(1, RANKS):
        theirs = tl.load(flags_ptr + (rank + i) % RANKS).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + rank * MOST_ROWS + row, meeting, sem="release", scope="sys")
    own = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
    for i in tl.static_range(1, RANKS):
        flag = own + (rank + i) % RANKS * MOST_ROWS + row
        seen = meeting - 1
        if MOST_TRIES == 0:
            while seen - meeting < 0:
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        else:
            tries = 0
            while (seen - meeting < 0) & (tries < MOST_TRIES):
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                tries += 1
    tl.store(meetings_ptr + row, meeting)

"""Layers that pass each row of a sequence through a state of one size, of each value head a matrix:

    q, k, v = silu(convolution of the row and the rows before it, channel by channel, + bias)
    S       = decay S + k u^T,    out = S^T q

`delta_net.py` and `mamba2.py` say what decay and u are. A key head serves several value heads. S is
float32. On a GPU rows pass in cells of 16, at absolute positions (`state_cells.py`); the reference,
which a CPU runs, passes them one by one. Either way the bits of a row depend on its sequence alone,
however the sequence is split into passes.

S cannot go back. So S of a slot covers whole cells of known tokens alone (in the reference, all
known tokens); the rows behind are kept as they came in, in a ring, which the convolution needs
anyway. The next pass begins with those of them that were accepted: it knows how many by its own
first position.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch
from ..triton_or_none import triton
from .rows import BatchRows
from .state_cells import CELL, CellPass, cells_kernel, constants_of, pass_cells
from .state_rows import prepare_kernel
from .state_warpgroups import is_for, pass_cells_by_warpgroups

_HEADS = 4  # convolved by a program
_ROWS = 4  # convolved by a program at once
_FEW_ROWS = 256  # with more in a pass, a program convolves _TIMES as many, in turn
_TIMES = 8


class StateHeads(NamedTuple):
    """The sizes of such a layer."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_scalars: int  # of each value head in a row, such as what its decay comes from

    @property
    def num_channels(self) -> int:
        """Of q, k and v, which the convolution reads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def row_width(self) -> int:
        """The channels, in the layer's own order, then the scalars."""
        return self.num_channels + self.all_scalars

    @property
    def all_scalars(self) -> int:
        return self.num_scalars * self.num_value_heads

    @property
    def corrects(self) -> bool:
        """Whether u depends on what S has for a key, as in a delta net, or, as in Mamba2, not."""
        return self.num_scalars == 2


class StateWeights(NamedTuple):
    """What such a layer has learned, besides its linear layers."""

    # [num_channels, taps], the last for the row itself; fastest if it lies tap by tap
    convolution: Tensor
    a_log: Tensor  # [num_value_heads] float32
    dt_bias: Tensor  # [num_value_heads] float32
    bias: Tensor | None = None  # [num_channels] of the convolution
    skip: Tensor | None = None  # [num_value_heads] float32: how much of v is added to `out`


class StateMemory(NamedTuple):
    """What it keeps of the sequence in each slot. A sequence begins at position 0, without any.

    What lies in a slot is dense; slots may be anywhere.
    """

    state: Tensor  # [num_slots, num_value_heads, key_dim, value_dim] float32
    # [num_slots, rows_kept(), row_width]; the row at a position lies at position % size
    ring: Tensor
    num_rows: Tensor  # [num_slots] int64, how many of the sequence's rows the state covers


# (state, window, heads, weights) -> what the last row of the window reads from the state, which it
# changes in place. [HV, DK, DV], [taps, row_width] -> [HV, DV]
PassRow = Callable[[Tensor, Tensor, StateHeads, StateWeights], Tensor]


def rows_kept(num_taps: int, max_drafts: int) -> int:
    """The size of the ring: rows that the state does not cover, known or of drafts, and those
    before them that the convolution of the first reads.
    """
    return max(1, num_taps - 1 + max_drafts + CELL - 1)


def pass_rows(
    x: Tensor,
    scalars: Tensor,
    heads: StateHeads,
    weights: StateWeights,
    memory: StateMemory,
    rows: BatchRows,
    num_tokens: Tensor,
    *,
    pass_row: PassRow,
) -> Tensor:
    """Pass the rows of a batch through their sequences' memory. `pass_row` is the reference for the
    kernels.

    Rows at the position `num_tokens` of their slot, or beyond, are of drafts; no more of them than
    the ring has room for.
    Shape: x [T, num_channels], scalars [T, all_scalars], each row dense; num_tokens [num_slots]
        int64 -> [T, num_value_heads, value_dim], anything in rows of padding.
    """
    if not uses_triton(x):
        return pass_rows_reference(
            x, scalars, heads, weights, memory, rows, num_tokens, pass_row=pass_row
        )
    assert x.stride(1) == scalars.stride(1) == 1
    assert memory.state.stride(3) == memory.ring.stride(2) == 1
    out = x.new_empty(len(x), heads.num_value_heads, heads.value_dim)
    num_seqs, ring_size = len(rows.slots), memory.ring.shape[1]
    num_taps = weights.convolution.shape[1]
    sequences = rows.slots, rows.seq_lens, rows.cu_seqlens_q
    covered = memory.num_rows, memory.num_rows.stride(0)
    starts = torch.empty_like(rows.slots)
    # A sequence has its rows here, and before them those that S does not cover yet.
    num_rows, most_before = len(x) + num_seqs * ring_size, ring_size - num_taps + 1
    convolved = x.new_empty(num_rows, heads.num_channels)
    num_factors = 2 * (heads.num_key_heads + heads.num_value_heads)
    factors = torch.empty(num_rows, num_factors, dtype=torch.float32, device=x.device)
    sizes = {
        "RING": ring_size,
        "KEY_HEADS": heads.num_key_heads,
        "VALUE_HEADS": heads.num_value_heads,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "CORRECTS": heads.corrects,
    }
    num_heads = 2 * heads.num_key_heads + heads.num_value_heads
    size = _ROWS if len(x) <= _FEW_ROWS else _ROWS * _TIMES
    extra = triton.cdiv(size - 1 + most_before, size)
    num_parts = len(x) // size + num_seqs * extra
    prepare_kernel[(triton.cdiv(num_heads, _HEADS), num_parts)](
        convolved, factors, starts, x, x.stride(0), scalars, scalars.stride(0), weights.convolution,
        *weights.convolution.stride(), weights.bias, weights.a_log, weights.dt_bias, memory.ring,
        memory.ring.stride(0), *sequences, *covered, num_seqs, size, extra, heads.key_dim**-0.5,
        **sizes, WIDTH=heads.row_width, TAPS=num_taps, HEADS=_HEADS,
        BLOCK_D=triton.next_power_of_2(max(heads.key_dim, heads.value_dim)), ROWS=_ROWS,
        **dependent_launch(x.device),
    )  # fmt: skip
    extra = triton.cdiv(CELL - 1 + most_before, CELL)
    num_cells = len(x) // CELL + num_seqs * extra
    cells = torch.empty(
        num_cells, heads.num_value_heads, 2 * CELL + 8, CELL, dtype=torch.float32, device=x.device
    )
    sizes["EXTRA"] = extra
    cells_kernel[(heads.num_value_heads, num_cells + num_seqs)](
        cells, convolved, factors, x, x.stride(0), scalars, scalars.stride(0), memory.ring,
        memory.ring.stride(0), starts, *sequences, *covered, num_tokens, num_seqs, num_cells,
        **sizes, **constants_of(heads.key_dim, x.dtype), WIDTH=heads.row_width,
        **dependent_launch(x.device), num_warps=1 if x.dtype == torch.bfloat16 else 4,
    )  # fmt: skip
    through = pass_cells
    if is_for(x.dtype, heads.key_dim, heads.value_dim, x.device):
        through = pass_cells_by_warpgroups
    through(
        CellPass(
            out, convolved, cells, weights.skip, memory.state, starts, sequences, num_tokens, sizes
        )
    )
    return out


def pass_rows_reference(
    x: Tensor,
    scalars: Tensor,
    heads: StateHeads,
    weights: StateWeights,
    memory: StateMemory,
    rows: BatchRows,
    num_tokens: Tensor,
    *,
    pass_row: PassRow,
) -> Tensor:
    """`pass_rows` one row at a time, and all steps of it: over several rows torch might round some
    of them in another way.
    """
    x = torch.cat((x, scalars), 1)
    out = x.new_zeros(len(x), heads.num_value_heads, heads.value_dim)
    ring_size, num_before = memory.ring.shape[1], weights.convolution.shape[1] - 1
    bounds, seq_lens = rows.cu_seqlens_q.tolist(), rows.seq_lens.tolist()
    for i, slot in enumerate(rows.slots.tolist()):
        begin, end, seq_len = bounds[i], bounds[i + 1], seq_lens[i]
        if begin == end:
            continue
        first, num_known = seq_len - (end - begin), min(seq_len, int(num_tokens[slot]))
        ring, state = memory.ring[slot], memory.state[slot]
        start = int(memory.num_rows[slot]) if first > 0 else 0
        if first == 0:
            state.zero_()
        kept = torch.arange(start - num_before, first, device=x.device)
        kept_rows = ring[kept % ring_size]
        kept_rows[kept < 0] = 0
        seen = torch.cat((kept_rows, x[begin:end]))
        for position in range(start, seq_len):
            window = seen[position - start : position - start + num_before + 1]
            if position == num_known:
                state = state.clone()  # what drafts do to it is not kept
            y = pass_row(state, window, heads, weights)
            if position >= first:
                out[begin + position - first] = y
        last = torch.arange(max(first, seq_len - ring_size), seq_len, device=x.device)
        ring[last % ring_size] = x[begin + last - first]
        memory.num_rows[slot] = num_known
    return out


def convolved_reference(window: Tensor, weights: StateWeights) -> Tensor:
    """silu of the convolution of a window's last row. Shape: [taps, row_width] -> [num_channels]"""
    taps = weights.convolution.float()
    mixed = window[:, : len(taps)].float()
    convolved = mixed[0] * taps[:, 0]
    for i in range(1, len(mixed)):
        convolved += mixed[i] * taps[:, i]
    if weights.bias is not None:
        convolved += weights.bias.float()
    return F.silu(convolved.to(window.dtype)).float()

"""K2: reads the rows that are still open, block by block, then draws and emits.

A listed row lacks the mass of max(P p - q, 0), which the draw and the tests of `block` need. The
first kernel spreads the listed rows evenly over all programs; the second has one program for each
request and draws.
"""

import torch

from .._dispatch import num_programs
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .block_rule import accept_blocks
from .decide import BAD, accept_tests
from .draw import draw_from_blocks, draw_words
from .residual import open_row, read_blocks
from .row_outcome import RowOutcomes
from .sampling import load_state
from .step import COLUMNS, Step, emit, in_slot, rows_of

_PROGRAMS_PER_SM = 8  # as many as can be resident
_WARPS = 4
_MAX_REGISTERS = 64
_DRAW_WARPS = 4


@triton.jit
def _open(request, j, k, row0, slot, tokens_ptr, step, num_columns, draft, rows):
    """A listed row in the form that residual.py takes."""
    row = (row0 + j).to(tl.int64)
    q_state = load_state(rows.state + row * 4, False)
    if draft.raw is not None:
        at_state = slot * (num_columns - 1) + j
        q_state = load_state(draft.state + at_state * 4, j < k)
    return open_row(
        slot, j, j < k, step.logits + row * step.logits_stride, step.width,
        load_state(rows.state + row * 4, True), q_state, tokens_ptr, draft,
        tl.load(rows.log_scale + request * num_columns + j),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_columns", "num_blocks"])
def _read_kernel(
    step,
    num_columns,  # K + 1
    num_blocks,
    draft,
    sampling,
    mass_ptr,  # [B, K + 1, num_blocks]
    rows,
    DEPENDENT: tl.constexpr,
):
    start_next_kernel(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    num_rows = tl.load(rows.counters)
    parts = tl.minimum(tl.maximum(tl.num_programs(0) // tl.maximum(num_rows, 1), 1), num_blocks)
    for item in range(tl.program_id(0), num_rows * parts, tl.num_programs(0)):
        listed = tl.load(rows.to_read + item // parts)
        request, j = listed // COLUMNS, listed % COLUMNS
        k, row0 = rows_of(request, step)
        slot, _anchor, _position, tokens_ptr = in_slot(request, step)
        row = _open(request, j, k, row0, slot, tokens_ptr, step, num_columns, draft, rows)
        read_blocks(
            mass_ptr + (request * num_columns + j).to(tl.int64) * num_blocks, item % parts, parts,
            num_blocks, row, step.vocab_size, 1.0 / tl.load(sampling.temperature + slot),
            draft.raw is not None,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_columns", "num_blocks"])
def _draw_kernel(
    step,
    num_columns,  # K + 1
    num_blocks,
    draft,
    sampling,
    mass_ptr,  # [B, K + 1, num_blocks]
    rows,
    out_ptr,  # [B, K + 2]
    NB: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    request = tl.program_id(0)
    # Loads that need not wait come first: all together they take the time of one.
    k, row0 = rows_of(request, step)
    slot, anchor, position, tokens_ptr = in_slot(request, step)
    inv_t = 1.0 / tl.load(sampling.temperature + slot)
    is_block = tl.load(sampling.rule + slot) == 1
    seed = tl.load(sampling.seed + slot)
    mass_ptr += (request * num_columns).to(tl.int64) * num_blocks
    wait_for_inputs(DEPENDENT)
    num_open = tl.load(rows.num_open + request)
    accepted, own, is_open, log_scale, u = accept_tests(
        request, k, is_block, num_columns, tokens_ptr, rows
    )
    if num_open == 0:
        return
    if is_block:
        accepted = accept_blocks(accepted, is_open, log_scale, u, k, num_blocks, mass_ptr, NB)
    row = _open(request, accepted, k, row0, slot, tokens_ptr, step, num_columns, draft, rows)
    words = draw_words(request, accepted, num_columns, seed, anchor, position, step)
    HAS_Q: tl.constexpr = draft.raw is not None
    last = draw_from_blocks(
        row, mass_ptr + accepted * num_blocks, num_blocks, step.vocab_size, inv_t, words, HAS_Q,
        NB,
    )  # fmt: skip
    emit(request, accepted, last, own == BAD, num_columns, slot, anchor, tokens_ptr, step, out_ptr)


def finish(step: Step, num_blocks: int, rows: RowOutcomes, out: torch.Tensor) -> None:
    """Write the outcomes of the requests that have listed rows."""
    device = step.logits.device
    mass = step.logits.new_empty(len(rows.to_read) * num_blocks, dtype=torch.int64)
    _read_kernel[(min(len(mass), num_programs(device, _PROGRAMS_PER_SM)),)](
        *step.arguments(num_blocks), mass, rows,
        **dependent_launch(device), num_warps=_WARPS, maxnreg=_MAX_REGISTERS,
    )  # fmt: skip
    _draw_kernel[(len(rows.num_open),)](
        *step.arguments(num_blocks), mass, rows, out,
        NB=triton.next_power_of_2(num_blocks), **dependent_launch(device), num_warps=_DRAW_WARPS,
    )  # fmt: skip

"""Speculative verification and sampling. Every emitted token comes from here.

Three rules, as toys. Of one request, with drafts x_0 .. x_k-1: p[i] and q[i] are the target's and
the draft's distribution after i drafts, u[i] uniform numbers; `draw` normalises.

    token:  for i in range(k):
                if u[i] > p[i][x[i]] / q[i][x[i]]:
                    return x[:i] + [draw(max(p[i] - q[i], 0))]  # recovered
            return x + [draw(p[k])]  # bonus

    block:  accepted, scale = 0, [1]
            for i in range(k):  # does not stop at a failure
                scale += [min(1, scale[i] * p[i][x[i]] / q[i][x[i]])]
                z = sum(max(scale[-1] * p[i + 1] - q[i + 1], 0))  # with q[k] = 0, so that h = scale
                if u[i] <= z / (z + 1 - scale[-1]): accepted = i + 1  # 0 / 0 counts as 1
            return x[:accepted] + [draw(max(scale[accepted] * p[accepted] - q[accepted], 0))]

    match:  for i in range(k + 1):  # each draft was drawn with the same noise
                own = argmax(log(p[i]) + gumbel(seed, position + i))
                if i == k or own != x[i]: return x[:i] + [own]

For a greedy request every rule compares drafts with the argmax. The pipeline:

    scan        K1   reads every row once, for the maxima and sums of exponentials of its blocks;
                     keeps a draft's logits
    row_state   K1b  one program a row: its state, the test of its draft and, mostly, its own token;
                     a request whose rows all have one is done
    bisection        the same, for filtered rows that are too flat for row_state
    finish      K2   reads the rows that are still open once more, and draws from them

The last two are launched only if a request may need them. Whichever ends a request writes its
tokens into its slot. Without drafts the token is drawn plainly: verification with k = 0. So is a
draft drawn from the draft model's logits (K0). Each kernel may start while the one before it ends,
except the scan, which waits for everything before.
"""

import torch
from torch import Tensor

from .._dispatch import uses_triton
from . import cpu
from .bisection import bisect_rows
from .decide import decide_reference
from .draw import draw_reference
from .finish import finish
from .log_odds import keep_log_odds_reference
from .residual import residual_reference
from .row_outcome import RowOutcomes
from .row_state import row_state, row_state_reference
from .sampling import MAX_DRAFTS, STATE_WIDTH
from .scan import scan, scan_reference
from .step import SlotContents, Step, emit_reference, gather_reference


def draw_draft(
    logits: Tensor,
    slots: SlotContents,
    slot: Tensor,
    offset: Tensor,
    kept: tuple[Tensor, Tensor] | None,
    vocab_size: int,
    filters: bool = True,
    draws: bool = True,
    log_odds: Tensor | None = None,
) -> Tensor:
    """Draw one draft a row from the processed distribution of the draft's logits, into its slot.

    A row with NaN, inf or no finite logit gives token 0 and a state whose log_z is NaN. `verify`
    treats that as a one-hot draft, which is still lossless.

    Parameters
    ----------
    logits
        Raw draft logits. Shape: [N, V'], float32, float16 or bfloat16, rows may be strided.
    slot
        The slot of each row's request; several rows may be of one. Shape: [N] int64.
    offset
        How many of the step's drafts come before this one: it is written, and its random numbers
        are found, so many positions after the known tokens. Shape: [N] int64.
    kept
        Where to keep the logits and states that drafts were drawn from, for `verify`; None:
        nowhere. Shape: [num_slots, K, V'] of any dtype, on a CPU that of the logits; and
        [num_slots, K, 4] float32.
    vocab_size
        Ids from here on are never drawn; V' may be smaller.
    filters
        False promises that no request filters (top-k, top-p, min-p), and saves launches.
    draws
        False promises that every request is greedy, and saves launches.
    log_odds
        Where to keep how sure the distributions were (log_odds.py); None: nowhere.
        Shape: [num_slots, K] float32.

    Returns
    -------
    The drafts. Shape: [N] int64.
    """
    vocab_size = min(vocab_size, logits.shape[1])
    step = Step(logits, None, slots, slot, None, 0, offset, kept, vocab_size, None, log_odds)
    if log_odds is not None and not uses_triton(logits):
        keep_log_odds_reference(log_odds, logits, slot, offset, slots.sampling, vocab_size)
    if cpu.takes(logits):
        return cpu.draw(step)
    return _draw(step, filters, draws)[:, 0]


def verify(
    target_logits: Tensor,
    cu_rows: Tensor,
    slots: SlotContents,
    slot: Tensor,
    num_drafts: Tensor,
    max_drafts: int,
    kept: tuple[Tensor, Tensor] | None,
    vocab_size: int,
    filters: bool = True,
    draws: bool = True,
    words: Tensor | None = None,
) -> Tensor:
    """Keep the drafts that each request's rule accepts, and draw the token after them.

    Every emitted token is distributed as the target's processed distribution, whatever the rule
    and the drafts. Without drafts a request gets a plain draw. The slots get the tokens in place
    of the drafts (and 0 after the last of them, which is never read), as known tokens.

    Parameters
    ----------
    target_logits
        Raw target logits. Request i has the k_i + 1 rows cu_rows[i]:cu_rows[i + 1]; its row j holds
        the logits after j drafts. Shape: [T, V], float32, float16 or bfloat16.
    cu_rows
        Shape: [B + 1] int32. Rows from cu_rows[B] on are padding.
    slots
        Each request's slot has its drafts after the known tokens. Those without known tokens are
        dummies, and stay so.
    slot
        No two requests have the same, unless it is a dummy. Shape: [B] of any integers.
    num_drafts
        k_i. Shape: [B] int32.
    max_drafts
        K in 0..32.
    kept
        What `draw_draft` kept; None: one-hot drafts. Drafts from K' <= K on are one-hot, as
        their states must say. Shape: [num_slots, K', V'] and [num_slots, K, 4].
    vocab_size
        Ids from here on are never emitted. At most V.
    filters
        False promises that no request filters (top-k, top-p, min-p), and saves launches.
    draws
        False promises that every request is greedy, and saves launches.
    words
        Random words to use instead of Philox's, for proofs: row i < K for the test of draft i,
        row K + 1 for the last draw. `match` ignores them. Shape: [B, K + 2, 4] int64.

    Returns
    -------
    K + 1 tokens, padded with -1; then 1 if a row that was needed held NaN, inf or no finite logit,
    and otherwise 0. Shape: [B, K + 2] int64.
    """
    if max_drafts > MAX_DRAFTS:
        raise ValueError(f"{max_drafts} drafts a request; at most {MAX_DRAFTS}")
    if vocab_size > target_logits.shape[1]:
        raise ValueError(
            f"vocab_size {vocab_size} exceeds the {target_logits.shape[1]} target logits of a row"
        )
    if cpu.takes(target_logits, None if kept is None else kept[0]):
        slots_np, num_drafts_np = slot.long().numpy(), num_drafts.long().numpy()
        return cpu.verify_arrays(
            slots, slots_np, num_drafts_np, max_drafts, target_logits, vocab_size, kept, words
        )
    step = Step(
        target_logits, cu_rows, slots, slot, num_drafts, max_drafts, None, kept, vocab_size, words
    )
    return _draw(step, filters, draws)


def _draw(step: Step, filters: bool, draws: bool) -> Tensor:
    """The requests' outcomes, also in their slots. Shape: [B, K + 2]."""
    if not uses_triton(step.logits):
        return _draw_reference(step)
    _check_layout(step)
    batch, k_max = len(step.slot), step.max_drafts
    if k_max == 0 and step.cu_rows is not None:
        step = step._replace(logits=step.logits[:batch], cu_rows=None)
    new = step.logits.new_empty
    rows = RowOutcomes(
        new((len(step.logits), STATE_WIDTH), dtype=torch.float32),
        new((batch, k_max + 1, 2), dtype=torch.float32),
        new((batch, k_max + 1), dtype=torch.int64),
        new((batch, k_max + 1), dtype=torch.float32),
        new(batch, dtype=torch.int32),
        new(batch * (k_max + 1), dtype=torch.int32),
        new(batch * (k_max + 1), dtype=torch.int32),
        new(batch + 2, dtype=torch.int32),
    )
    out = new((batch, k_max + 2), dtype=torch.int64)
    filters = filters and draws
    stats = scan(
        step.logits, step.vocab_size, step.cu_rows, step.slot, step.slots.sampling, rows.counters,
        step.offset, None if step.offset is None or step.kept is None else step.kept[0],
    )  # fmt: skip
    row_state(step, stats, filters, rows, out)
    if filters:
        bisect_rows(step, stats, rows, out)
    if draws and (filters or k_max > 0):
        finish(step, stats.max.shape[1], rows, out)
    return out


def _draw_reference(step: Step) -> Tensor:
    gathered = gather_reference(step)
    logits, vocab_size = gathered.logits, step.vocab_size
    of_row = gathered.sampling.take(torch.repeat_interleave(gathered.num_drafts + 1))
    stats = scan_reference(logits, of_row, vocab_size)
    rows = row_state_reference(logits, stats, of_row, vocab_size)
    decision = decide_reference(gathered, rows)
    mass = residual_reference(gathered, rows, decision)
    out = draw_reference(gathered, stats, rows, decision, mass)
    emit_reference(step, gathered.position, out)
    if step.offset is not None and step.kept is not None:
        kept, states = step.kept
        kept[step.slot, step.offset] = logits.to(kept.dtype)
        states[step.slot, step.offset] = rows.state
    return out


def _check_layout(step: Step) -> None:
    """Refuse strided tensors: the kernels assume dense ones and would read the wrong elements."""
    slots, of_requests = step.slots, (step.slot, step.num_drafts, step.offset)
    vectors = (*slots.sampling, slots.num_tokens, *of_requests)
    assert step.logits.stride(1) == 1, "logits: the vocabulary must be the dense dimension"
    assert all(x is None or x.stride(0) == 1 or len(x) == 1 for x in vectors)
    assert slots.token_ids.stride(1) == 1
    if step.kept is not None and (step.max_drafts > 0 or step.offset is not None):
        logits, state = step.kept
        assert logits.stride(2) == 1
        assert state.is_contiguous(), "the states of drafts must be contiguous"
        assert step.max_drafts in (0, state.shape[1])

"""K1b: computes each row's state (maximum, log-normaliser, threshold, tie cutoff) and own token.

Top-k, top-p (of what top-k leaves) and min-p (relative to the maximum) each keep a prefix of the
order (logit descending, token id ascending). So together they keep the shortest of the three
prefixes, and (threshold, cutoff) describes it without storing any probabilities.

The kernel merges the sums of a row's blocks, and ranks the few tokens that filters can leave
(candidates.py). If they are not few, a second kernel bisects the logits' bit patterns instead
(bisection.py). Then it tests the row's draft (decide.py), draws the row's own token if that needs
no second reading of the whole row (draw.py, match.py), and concludes the row (row_outcome.py).
"""

import numpy as np
import torch

from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .candidates import CANDIDATE_SCRATCH, MAX_GROUPS, threshold_from_candidates
from .decide import BAD, OPEN, accept_test, load_draft
from .draw import draw_from_candidates, draw_from_sums, draw_words
from .keys import value_of
from .log_odds import keep_log_odds
from .philox import FIXED_ONE, log, log_of_fixed
from .residual import open_row
from .row_outcome import RowOutcomes, conclude_row, greedy_token, settle_row
from .sampling import BLOCK, GROUP, STATE_WIDTH, RowStates, Sampling, block_width, is_filtered
from .scan import BlockStats, load_stats, merge_max, merge_totals
from .step import COLUMNS, Step, in_slot, rows_of

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(GROUP)
# Warps and registers of a program, without and with filters: 4 or 3 programs a multiprocessor.
_SHAPES = {False: (4, 128), True: (8, 80)}
_FIRST_CANDIDATES = 256  # top-p rarely leaves more
_WIDER = 16  # if it does, look at this many times more


def row_state_reference(
    logits: torch.Tensor, stats: BlockStats, sampling: Sampling, vocab_size: int
) -> RowStates:
    """States of rows under their own parameters. Shape: logits [N, V], sampling [N]."""
    row_max, block = stats.max.max(-1)
    ids = block[:, None] * BLOCK + torch.arange(block_width(vocab_size), device=logits.device)
    best = logits.gather(1, ids.clamp_max_(vocab_size - 1)).argmax(-1, keepdim=True)
    argmax = ids.gather(1, best).squeeze(1)
    inv_t = sampling.inverse_temperature()
    relative = torch.exp((stats.max - row_max[:, None]) * inv_t[:, None])
    z = (stats.total.double() * relative).sum(-1)
    # Greedy rows need no normaliser: any number will do that marks them as not bad.
    log_z = torch.where(sampling.temperature > 0, z.log().float(), 0.0)
    bad = ~row_max.isfinite()
    state = torch.empty(len(logits), STATE_WIDTH, device=logits.device)
    state[:, 0] = row_max
    state[:, 1] = torch.where(bad, torch.nan, log_z)
    state[:, 2] = -torch.inf
    state[:, 3] = vocab_size
    for i in (sampling.is_filtered(vocab_size) & ~bad).nonzero().squeeze(-1).tolist():
        own = Sampling(*(field[i] for field in sampling))
        state[i, 1:] = _filter_reference(logits[i, :vocab_size].float(), z[i], own)
    return RowStates(state, torch.where(bad, -1, argmax))


def _filter_reference(x: torch.Tensor, z: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(log_z, threshold, cutoff) of a filtered row.

    Shape: x [V] float32; z, its sum of exp((l - max) / t) in float64, and sampling are scalars.
    """
    vocab_size = len(x)
    top_k = min(int(sampling.top_k), vocab_size) or vocab_size
    top_p, min_p = float(sampling.top_p), float(sampling.min_p)
    num_candidates = min(top_k, _FIRST_CANDIDATES if top_k == vocab_size else top_k)
    while True:
        value = _highest(x, num_candidates)
        relative = torch.exp((value - value[0]) * sampling.inverse_temperature())
        weight = (relative * FIXED_ONE).long()
        total = weight.cumsum(0)
        num_kept = num_candidates
        if top_p < 1:
            mass = float(total[-1]) if top_k < vocab_size else float(z) * FIXED_ONE
            num_kept = int(torch.searchsorted((total - weight).double(), top_p * mass))
        if min_p > 0:
            num_kept = min(num_kept, int((relative >= min_p).sum()))
        if num_kept < num_candidates or num_candidates == top_k:
            break
        num_candidates = min(_WIDER * num_candidates, vocab_size)
    last = max(0, num_kept - 1)
    threshold = value[last]
    num_ties = last + 1 - int((value > threshold).sum())
    tied = (x == threshold).nonzero().squeeze(-1)
    cutoff = tied[num_ties - 1] if num_ties < len(tied) else vocab_size
    log_z = (total[last].double() / FIXED_ONE).log().float()
    return torch.stack((log_z, threshold, torch.as_tensor(cutoff, device=x.device)))


def _highest(row: torch.Tensor, count: int) -> torch.Tensor:
    """The highest values of a row, in falling order. Shape: [V] -> [count]."""
    if count <= len(row) // 8:
        return row.topk(count, sorted=True).values
    # numpy's sort is vectorised and takes a quarter of torch's time.
    ascending = torch.from_numpy(np.sort(row.numpy(force=True)))
    return ascending.flip(0)[:count].to(row.device)


@triton.jit(do_not_specialize=["num_columns"])
def _row_state_kernel(
    step,
    num_columns,  # K + 1
    num_blocks,
    draft,
    sampling,
    stats,
    scratch_ptr,  # [N, scratch_stride] int64, if anything filters
    scratch_stride,
    rows,
    out_ptr,  # [B, K + 2]
    FILTERS: tl.constexpr,
    NB: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    request = tl.program_id(0) // num_columns
    offset = tl.program_id(0) % num_columns
    width, vocab_size = step.width, step.vocab_size
    # Loads that need not wait come first: all together they take the time of one.
    k, row0 = rows_of(request, step)
    slot, anchor, position, tokens_ptr = in_slot(request, step)
    temperature = tl.load(sampling.temperature + slot)
    rule = tl.load(sampling.rule + slot)
    seed = tl.load(sampling.seed + slot)
    draft_id = tl.load(tokens_ptr + offset, mask=offset < num_columns - 1, other=-1)
    wait_for_inputs(DEPENDENT)
    if offset > k:
        return
    row = (row0 + offset).to(tl.int64)
    row_ptr = step.logits + row * step.logits_stride
    block_max, total = load_stats(row, stats, num_blocks, NB)
    if step.log_odds is not None:
        keep_log_odds(block_max, total, temperature, request, slot, step)
    is_settled = offset <= k
    if temperature <= 0:
        row_max, bad = merge_max(block_max)
        own = greedy_token(block_max, row_max, row_ptr, vocab_size, NB).to(tl.int64)
        own = tl.where(bad, BAD, own)
    else:
        inv_t = 1.0 / temperature
        drafted = load_draft(
            draft_id, request, slot, offset, k, row_ptr, vocab_size, num_columns, draft, seed,
            anchor, step.words,
        )  # fmt: skip
        row_max, bad = merge_max(block_max)
        z = merge_totals(block_max, total, row_max, inv_t)
        log_z = tl.where(bad, float("nan"), log(z))
        threshold = -float("inf")
        cutoff = vocab_size.to(tl.float32)
        groups = num_blocks * (_BLOCK // _GROUP)
        group_max_ptr = stats.group_max + row * groups
        scratch_ptr += row * scratch_stride
        candidates_ptr = scratch_ptr + MAX_GROUPS
        filtered = offset > k
        num_candidates = 0
        if FILTERS:  # noqa: SIM102 (known when compiled)
            if is_filtered(slot, sampling, vocab_size) & (bad == 0):
                filtered = offset <= k
                top_k = tl.load(sampling.top_k + slot)
                is_settled, key, last_tie, kept, num_candidates = threshold_from_candidates(
                    row_ptr, vocab_size, row_max, z, inv_t, top_k,
                    tl.load(sampling.top_p + slot), tl.load(sampling.min_p + slot),
                    (top_k > 0) & (top_k < vocab_size), group_max_ptr, groups,
                    scratch_ptr.to(tl.pointer_type(tl.int32), bitcast=True), candidates_ptr,
                    GROUPS,
                )  # fmt: skip
                log_z = log_of_fixed(kept)
                threshold = value_of(key)
                cutoff = last_tie.to(tl.float32)
        own = tl.full((), OPEN, tl.int64)
        if is_settled:
            if (num_columns > 1) | FILTERS:  # otherwise no kernel of ours follows
                # Not earlier: the next kernel's programs would take issue slots while they wait.
                start_next_kernel(DEPENDENT)
            state = row_max, log_z, threshold, cutoff
            test = accept_test(drafted, state, inv_t)
            is_last = offset == k
            if ((rule != 2) & is_last) | ((rule == 0) & filtered & (test[2] == 0)):
                words = draw_words(request, offset, num_columns, seed, anchor, position, step)
                if filtered:
                    HAS_Q: tl.constexpr = draft.raw is not None
                    opened = open_row(
                        slot, offset, is_last == 0, row_ptr, width, state, drafted[4], tokens_ptr,
                        draft, 0.0,
                    )  # fmt: skip
                    own = draw_from_candidates(
                        opened, candidates_ptr, num_candidates, vocab_size, inv_t, words, HAS_Q
                    )
                else:
                    own = draw_from_sums(
                        block_max, total, row_ptr, state, inv_t, num_blocks, vocab_size, words
                    )
            own = settle_row(
                test, own, request, offset, row, row_ptr, state, inv_t, group_max_ptr, groups,
                vocab_size, num_columns, slot, position, tokens_ptr, step, sampling, rows,
            )  # fmt: skip
    if is_settled:
        conclude_row(
            own, (rule == 1) & (temperature > 0), request, offset, k, num_columns, slot, anchor,
            tokens_ptr, step, rows, out_ptr,
        )  # fmt: skip
    else:
        place = tl.atomic_add(rows.counters + 1, 1, sem="relaxed")
        tl.store(rows.to_bisect + place, request * COLUMNS + offset)


def row_state(
    step: Step, stats: BlockStats, filters: bool, rows: RowOutcomes, out: torch.Tensor
) -> None:
    """Compute every row, and write the outcomes of requests that have no open row.

    `filters` False promises that no row is filtered; otherwise `bisect_rows` must follow.
    """
    logits, blocks = step.logits, stats.max.shape[1]
    scratch_rows = len(logits) if filters else 0
    num_warps, max_registers = _SHAPES[filters]
    _row_state_kernel[(len(step.slot) * (step.max_drafts + 1),)](
        *step.arguments(blocks), stats,
        logits.new_empty((scratch_rows, CANDIDATE_SCRATCH), dtype=torch.int64), CANDIDATE_SCRATCH,
        rows, out,
        FILTERS=filters, NB=triton.next_power_of_2(blocks),
        GROUPS=triton.next_power_of_2(blocks * (BLOCK // GROUP)), **dependent_launch(logits.device),
        num_warps=num_warps, maxnreg=max_registers,
    )  # fmt: skip

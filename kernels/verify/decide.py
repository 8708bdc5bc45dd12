"""The accept tests of all requests, and which rows must be read again.

`token` (arXiv 2211.17192, 2302.01318) accepts X_i while u_i <= p(X_i) / q(X_i). `block`
(arXiv 2403.10444) follows P_i = min(1, P_{i-1} p(X_i) / q(X_i)) and accepts up to the last i with
u_i <= h_i = Z_i / (Z_i + 1 - P_i), where Z_i = sum max(P_i p - q, 0) is only known once row i is
read. As h_i <= P_i, and h_i = 1 where P_i = 1, only the last i with P_i = 1 and the later ones
with u_i <= P_i are read, and none at all when u_k <= P_k = h_k.
"""

from typing import NamedTuple

import torch

from ..triton_or_none import tl, triton
from .philox import Purpose, log, philox, philox_reference, uniform, uniform_reference
from .sampling import STATE_LOG_Z, RowStates, Rule, load_state, log_prob, log_prob_reference
from .step import COLUMNS, GatheredStep, row_index_reference

# Values in place of a row's own token:
BAD = tl.constexpr(-1)  # the row holds NaN, inf or no finite logit
OPEN = tl.constexpr(-2)  # not drawn yet


class Decision(NamedTuple):
    num_accepted: torch.Tensor  # [B] int64; for `block`, as far as known without Z; for `match`, 0
    rows_to_read: torch.Tensor  # [B] int64, bit j: row j must be read
    log_scale: torch.Tensor  # [B, K + 1] float32 log P_j (0 for `token`)


def accept_words_reference(step: GatheredStep) -> torch.Tensor:
    """One 32-bit random word for each draft, held in int64. Shape: [B, K]."""
    num_drafts = step.draft_ids.shape[1] - 1
    if step.words is not None:
        return step.words[:, :num_drafts, 0]
    seed, anchor = step.sampling.seed[:, None], step.anchor[:, None]
    offset = torch.arange(num_drafts, device=anchor.device)
    purpose = torch.full_like(offset, Purpose.ACCEPT)
    zero = torch.zeros_like(offset)
    return philox_reference(seed, anchor, offset, purpose, zero)[0]


def log_ratio_reference(
    step: GatheredStep, rows: RowStates, row_index: torch.Tensor
) -> torch.Tensor:
    """log p(X_i) - log q(X_i); -inf if p or q is 0, or X_i is no token. Shape: [B, K]."""
    ids, raw, q_state = (
        each[:, :-1] for each in (step.draft_ids, step.draft_logits, step.draft_state)
    )
    valid = (ids >= 0) & (ids < step.vocab_size)
    safe_ids = torch.where(valid, ids, 0)
    at = row_index[:, :-1]
    inv_t = step.sampling.inverse_temperature()[:, None].expand(at.shape)
    log_p = log_prob_reference(step.logits[at, safe_ids].float(), safe_ids, rows.state[at], inv_t)
    width = raw.shape[-1]
    raw = raw.gather(2, safe_ids.clamp_max(width - 1)[..., None])[..., 0].float()
    raw = torch.where(safe_ids < width, raw, -torch.inf)
    log_q = log_prob_reference(raw, safe_ids, q_state, inv_t)
    log_q = torch.where(q_state[..., STATE_LOG_Z].isnan(), 0.0, log_q)
    # A draft with q = 0, which a proposer must never make, is rejected; so is NaN.
    possible = valid & (log_p > -torch.inf) & (log_q > -torch.inf)
    return torch.where(possible, log_p - log_q, -torch.inf)


def decide_reference(step: GatheredStep, rows: RowStates) -> Decision:
    """The accept tests of all requests."""
    sampling, k = step.sampling, step.num_drafts
    row_index = row_index_reference(step)
    greedy = sampling.temperature <= 0
    ratio = log_ratio_reference(step, rows, row_index)
    log_u = uniform_reference(accept_words_reference(step)).log()
    own = rows.argmax[row_index[:, :-1]]
    same = (own == step.draft_ids[:, :-1]) & (own >= 0)
    accepted = torch.where(greedy[:, None], same, log_u <= ratio).long().cumprod(-1).sum(-1)
    log_scale = torch.zeros(row_index.shape, device=step.logits.device)
    later = torch.zeros_like(k)  # bit j: row j must be read, since its Z decides
    block = (sampling.rule == Rule.BLOCK) & ~greedy
    if bool(block.any()):
        scale = log_scale[:, 0]
        for i in range(ratio.shape[1]):
            scale = (scale + ratio[:, i]).clamp_max(0.0)
            log_scale[:, i + 1] = torch.where(block, scale, 0.0)
        index = torch.arange(row_index.shape[1], device=step.logits.device)
        first = torch.where(log_scale == 0, index, 0).amax(-1)  # h = 1: accepted without a Z
        passed = torch.zeros_like(row_index, dtype=torch.bool)
        passed[:, 1:] = log_u <= log_scale[:, 1:]
        whole = (k == 0) | passed.gather(1, k[:, None]).squeeze(1)
        needed = (index == first[:, None]) | (passed & (index > first[:, None]))
        bits = ((needed & (index < k[:, None])).long() << index).sum(-1)
        accepted = torch.where(block, torch.where(whole, k, first), accepted)
        later = torch.where(block & ~whole, bits, 0)
    match = (sampling.rule == Rule.MATCH) & ~greedy
    accepted = torch.where(match, 0, accepted)
    # The last row: it is drawn from a residual, or filtered, and K1 summed neither.
    read_last = ~greedy & ((accepted < k) | sampling.is_filtered(step.vocab_size))
    rows_to_read = later | (read_last.long() << accepted)
    rows_to_read = torch.where(match, 0, rows_to_read)
    return Decision(accepted, rows_to_read, log_scale)


@triton.jit
def load_draft(
    token, request, slot, j, k, row_ptr, vocab_size, num_columns, draft, seed, anchor, words_ptr
):
    """What the accept test of a request's j-th draft needs, besides the row's state."""
    is_column = j < num_columns - 1  # unlike `exists`, known before k is loaded
    exists = (j < k) & (token >= 0) & (token < vocab_size)
    raw = tl.load(row_ptr + token, mask=exists, other=0.0).to(tl.float32)
    zero = tl.zeros((), tl.float32)
    raw_q = zero - float("inf")
    q_state = zero, zero + float("nan"), zero, zero
    if draft.raw is not None:
        at_q = slot * draft.slot_stride + j.to(tl.int64) * draft.column_stride + token
        in_q = exists & (token < draft.width) & (j < draft.columns)
        raw_q = tl.load(draft.raw + at_q, mask=in_q, other=-float("inf")).to(tl.float32)
        q_state = load_state(draft.state + (slot * (num_columns - 1) + j) * 4, is_column)
    if words_ptr is None:
        one = tl.full((), 1, tl.int32)
        word, _, _, _ = philox(seed, anchor.to(tl.int32), j, one, one - one)
    else:
        at_word = words_ptr + (request * (num_columns + 1) + j) * 4
        word = tl.load(at_word, mask=is_column, other=0).to(tl.uint32)
    return token, exists, raw, raw_q, q_state, uniform(word)


@triton.jit
def log_ratio(drafted, state, inv_t):
    """log p(X) - log q(X); -inf if p or q is 0, or X is no token."""
    token, exists, raw, raw_q, q_state, _u = drafted
    log_p = log_prob(raw, token, state[0], state[1], state[2], state[3], inv_t)
    log_q = log_prob(raw_q, token, q_state[0], q_state[1], q_state[2], q_state[3], inv_t)
    log_q = tl.where(raw_q > -float("inf"), log_q, -float("inf"))
    log_q = tl.where(q_state[1] != q_state[1], 0.0, log_q)
    possible = exists & (log_p > -float("inf")) & (log_q > -float("inf"))
    return tl.where(possible, log_p - log_q, -float("inf"))


@triton.jit
def accept_test(drafted, state, inv_t):
    """The draft's log ratio and its uniform number, and whether the rule `token` accepts it."""
    ratio, u = log_ratio(drafted, state, inv_t), drafted[5]
    return ratio, u, log(u) <= ratio


@triton.jit
def _then(first_sum, first_cap, second_sum, second_cap):
    """Composes two functions of the form s -> min(s + sum, cap)."""
    return first_sum + second_sum, tl.minimum(first_cap + second_sum, second_cap)


@triton.jit
def _log_scales(request, k, num_columns, tests_ptr):
    """For each column j: log P_j, and the uniform number of the draft before it."""
    column = tl.arange(0, COLUMNS)
    at = tests_ptr + (request * num_columns + column - 1) * 2
    is_draft = (column > 0) & (column <= k)
    ratio = tl.load(at, mask=is_draft, other=0.0)
    u = tl.load(at + 1, mask=is_draft, other=1.0)
    total, cap = tl.associative_scan((ratio, tl.zeros((COLUMNS,), tl.float32)), 0, _then)
    return tl.minimum(total, cap), u


@triton.jit
def accept_tests(request, k, is_block, num_columns, tokens_ptr, rows):
    """What is known of a request once all its rows have their states.

    Returns how many drafts are accepted as far as is known, and for each column: the row's own
    token, whether the row must be read to know more, log P_j (0 except for `block`), and the
    uniform number of the draft before it. For `block`, drafts are accepted up to the last i with
    P_i = 1; that row and the later ones with u_i <= P_i must be read. For the other rules, the
    leading drafts that equal their rows' own tokens are accepted.
    """
    column = tl.arange(0, COLUMNS)
    at = request * num_columns + column
    own = tl.load(rows.own + at, mask=column < num_columns, other=BAD)
    token = tl.load(tokens_ptr + column, mask=column < num_columns - 1, other=-1)
    own = tl.where(column <= k, own, BAD)
    accepts = (own == token) & (token >= 0) & (column < k)
    accepted = tl.min(tl.where(accepts, k, column), 0)
    wanted = column == accepted
    log_scale = tl.zeros((COLUMNS,), tl.float32)
    u = log_scale
    if is_block:
        log_scale, u = _log_scales(request, k, num_columns, rows.tests)
        passed = (log(u) <= log_scale) & (column > 0) & (column <= k)
        certain = tl.max(tl.where((log_scale == 0.0) & (column <= k), column, 0), 0)
        whole = (k == 0) | (tl.max(tl.where(passed, column, 0), 0) == k)
        accepted = tl.where(whole, k, certain)
        wanted = (column == accepted) | (passed & (column > accepted))
    return accepted, own, wanted & (own == OPEN), log_scale, u

"""K2: the accept tests of every request, and which rows must be read again.

`token` (arXiv 2211.17192, 2302.01318) accepts X_i while u_i <= p(X_i) / q(X_i). `block`
(arXiv 2403.10444) follows P_i = min(1, P_{i-1} p(X_i) / q(X_i)) and accepts up to the last i with
u_i <= h_i = Z_i / (Z_i + 1 - P_i), where Z_i = sum max(P_i p - q, 0) is only known after K3. As
h_i <= P_i, and h_i = 1 where P_i = 1, only the last i with P_i = 1 and the later ones with
u_i <= P_i are read, and none at all when u_k <= P_k = h_k.
"""

from typing import NamedTuple

import torch

from outrider.kernels.philox import Purpose, philox_reference, uniform_reference
from outrider.kernels.row_state import RowStates
from outrider.kernels.sampling import STATE_LOG_Z, Rule, Sampling, log_prob_reference


class Drafts(NamedTuple):
    """What was proposed; without logits, or where a state's log_z is NaN, q is one-hot."""

    token_ids: torch.Tensor  # [B, K] int64, ignored from num_drafts on
    num_drafts: torch.Tensor  # [B] int32, 0..K
    logits: torch.Tensor | None  # [B, K, V'] raw, as the draft's head gave them
    state: torch.Tensor | None  # [B, K, 4] float32, from draft_sample


class Plan(NamedTuple):
    num_accepted: torch.Tensor  # [B] int32; of `block`, what needs no Z; of `match`, 0
    rows_to_read: torch.Tensor  # [B] int64, bit j: K3 reads row j
    log_scale: torch.Tensor  # [B, K + 1] float32 log P_j (0 for `token`)


def row_index_reference(cu_rows: torch.Tensor, drafts: Drafts) -> torch.Tensor:
    """Row of each (request, offset), clamped into the request. Shape: [B, K + 1] int64."""
    offset = torch.arange(drafts.token_ids.shape[1] + 1, device=cu_rows.device)
    return cu_rows[:-1, None].long() + torch.minimum(offset, drafts.num_drafts[:, None].long())


def accept_words_reference(
    sampling: Sampling, anchor: torch.Tensor, num_drafts: int, words: torch.Tensor | None
) -> torch.Tensor:
    """One 32-bit word a draft, held in int64. Shape: [B, K]."""
    if words is not None:
        return words[:, :num_drafts, 0]
    offset = torch.arange(num_drafts, device=anchor.device)
    purpose = torch.full_like(offset, Purpose.ACCEPT)
    zero = torch.zeros_like(offset)
    return philox_reference(sampling.seed[:, None], anchor[:, None], offset, purpose, zero)[0]


def log_ratio_reference(
    logits: torch.Tensor,
    rows: RowStates,
    row_index: torch.Tensor,
    drafts: Drafts,
    sampling: Sampling,
    vocab_size: int,
) -> torch.Tensor:
    """log p(X_i) - log q(X_i), -inf where p is 0, q is 0 or X_i is no token. Shape: [B, K]."""
    ids = drafts.token_ids
    offset = torch.arange(ids.shape[1], device=ids.device)
    valid = (offset < drafts.num_drafts[:, None]) & (ids >= 0) & (ids < vocab_size)
    safe_ids = torch.where(valid, ids, 0)
    at = row_index[:, :-1]
    inv_t = sampling.inverse_temperature()[:, None].expand(at.shape)
    log_p = log_prob_reference(logits[at, safe_ids].float(), safe_ids, rows.state[at], inv_t)
    if drafts.logits is None or drafts.state is None:
        log_q = torch.zeros_like(log_p)
    else:
        width = drafts.logits.shape[-1]
        raw = drafts.logits.gather(2, safe_ids.clamp_max(width - 1)[..., None])[..., 0].float()
        raw = torch.where(safe_ids < width, raw, -torch.inf)
        log_q = log_prob_reference(raw, safe_ids, drafts.state, inv_t)
        log_q = torch.where(drafts.state[..., STATE_LOG_Z].isnan(), 0.0, log_q)
    # A draft of q = 0 breaks the proposer's contract: rejected. NaN compares false: rejected.
    possible = valid & (log_p > -torch.inf) & (log_q > -torch.inf)
    return torch.where(possible, log_p - log_q, -torch.inf)


def decide_reference(
    logits: torch.Tensor,
    rows: RowStates,
    cu_rows: torch.Tensor,
    drafts: Drafts,
    sampling: Sampling,
    anchor: torch.Tensor,
    vocab_size: int,
    words: torch.Tensor | None = None,
) -> Plan:
    """Accept tests of every request; `words` [B, K + 2, 4] int64 replaces the random words."""
    batch, k_max = drafts.token_ids.shape
    k = drafts.num_drafts.long()
    row_index = row_index_reference(cu_rows, drafts)
    greedy = sampling.temperature <= 0
    log_scale = torch.zeros(batch, k_max + 1, device=logits.device)
    accepted = torch.zeros_like(k)
    later = torch.zeros_like(k)  # bits of the rows whose Z decides
    if k_max:
        offset = torch.arange(k_max, device=logits.device)
        in_range = offset < k[:, None]
        ratio = log_ratio_reference(logits, rows, row_index, drafts, sampling, vocab_size)
        log_u = uniform_reference(accept_words_reference(sampling, anchor, k_max, words)).log()
        same = rows.argmax[row_index[:, :-1]] == drafts.token_ids
        ok = torch.where(greedy[:, None], same, log_u <= ratio) & in_range
        accepted = ok.long().cumprod(-1).sum(-1)
        block = (sampling.rule == Rule.BLOCK) & ~greedy
        if bool(block.any()):
            scale = log_scale[:, 0]
            for i in range(k_max):
                scale = (scale + ratio[:, i]).clamp_max(0.0)
                log_scale[:, i + 1] = torch.where(block, scale, 0.0)
            index = torch.arange(k_max + 1, device=logits.device)
            certain = (log_scale == 0) & (index <= k[:, None])
            first = torch.where(certain, index, 0).amax(-1)  # h = 1: accepted without a Z
            passed = torch.zeros_like(certain)
            passed[:, 1:] = (log_u <= log_scale[:, 1:]) & in_range
            whole = (k == 0) | passed.gather(1, k[:, None]).squeeze(1)
            needed = (index == first[:, None]) | (passed & (index > first[:, None]))
            bits = ((needed & (index < k[:, None])).long() << index).sum(-1)
            accepted = torch.where(block, torch.where(whole, k, first), accepted)
            later = torch.where(block & ~whole, bits, 0)
    match = (sampling.rule == Rule.MATCH) & ~greedy
    accepted = torch.where(match, 0, accepted)
    # The last row: a residual, or a filtered row whose blocks' sums K1 could not know.
    read_last = ~greedy & ((accepted < k) | sampling.is_filtered(vocab_size))
    rows_to_read = later | (read_last.long() << accepted)
    rows_to_read = torch.where(match, (1 << (k + 1)) - 1, rows_to_read)
    return Plan(accepted.int(), rows_to_read, log_scale)

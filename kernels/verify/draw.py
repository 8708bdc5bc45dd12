"""How many drafts of a request that draws are accepted, and which token follows them.

The last token is drawn by inverse CDF in two stages: first a block, then a token inside it. Each
takes 40 random bits and int64 weights, and only that one block is read. For `match`, see match.py.
"""

import torch

from ..triton_or_none import tl, triton
from .block_rule import accept_blocks_reference
from .candidates import load_candidates
from .decide import Decision
from .match import match_reference
from .philox import FIXED_ONE, Purpose, exp, fixed, philox, philox_reference, pick, pick_reference
from .residual import (
    block_weights,
    load_block,
    load_draft_logits,
    probs,
    read_blocks,
    token_weights,
    weights_reference,
    without_draft,
)
from .sampling import (
    BLOCK,
    STATE_LOG_Z,
    STATE_MAX,
    RowStates,
    Rule,
    block_width,
    log_prob_reference,
)
from .scan import BlockStats, blocks_reference
from .step import GatheredStep, outcome_reference, row_index_reference

_BLOCK = tl.constexpr(BLOCK)
_DRAFT, _FINAL = tl.constexpr(int(Purpose.DRAFT)), tl.constexpr(int(Purpose.FINAL))


def draw_reference(
    step: GatheredStep, stats: BlockStats, rows: RowStates, decision: Decision, mass: torch.Tensor
) -> torch.Tensor:
    """Outcome of every request. Shape: [B, K + 2]."""
    logits, sampling = step.logits, step.sampling
    num_columns = step.draft_ids.shape[1]
    offset = torch.arange(num_columns, device=logits.device)
    row_index = row_index_reference(step)
    greedy = sampling.temperature <= 0
    match = (sampling.rule == Rule.MATCH) & ~greedy
    accepted = accept_blocks_reference(step, decision, mass)
    last = torch.zeros_like(accepted)
    pairs = match.nonzero().squeeze(-1)
    if len(pairs):
        at = row_index[pairs].flatten()  # repeats of a request's last row are ignored below
        own = sampling.take(pairs.repeat_interleave(num_columns))
        tokens = match_reference(
            logits[at], rows.state[at], own.inverse_temperature(), own.seed,
            (step.position[pairs, None] + offset).flatten(), step.vocab_size,
        ).view(-1, num_columns)  # fmt: skip
        tokens = torch.where(rows.state[row_index[pairs], STATE_LOG_Z].isnan(), -1, tokens)
        same = (tokens == step.draft_ids[pairs]) & (tokens >= 0)
        accepted[pairs] = same.long().cumprod(-1).sum(-1)
        last[pairs] = tokens.gather(1, accepted[pairs, None]).squeeze(1)
    row = row_index.gather(1, accepted[:, None]).squeeze(1)
    last = torch.where(greedy, rows.argmax[row].long(), last)
    drawn = (~greedy & ~match).nonzero().squeeze(-1)
    if len(drawn):
        last[drawn] = _draw_last_reference(
            step, stats, rows, decision, mass, drawn, accepted[drawn], row[drawn]
        )  # fmt: skip
    bad = rows.state[row_index, STATE_LOG_Z].isnan()
    return outcome_reference(step.draft_ids, accepted, last, bad)


def _block_mass_reference(
    stats: BlockStats, rows: RowStates, row: torch.Tensor, inv_t: torch.Tensor
) -> torch.Tensor:
    """Block masses of unfiltered rows, from their stats. Shape: [R] -> [R, num_blocks] int64."""
    state = rows.state[row]
    relative = (stats.max[row] - state[:, STATE_MAX, None]) * inv_t[:, None]
    block_p = stats.total[row] * torch.exp(relative - state[:, STATE_LOG_Z, None])
    return (block_p * FIXED_ONE).long()


def _draw_last_reference(
    step: GatheredStep,
    stats: BlockStats,
    rows: RowStates,
    decision: Decision,
    mass: torch.Tensor,
    b: torch.Tensor,
    accepted: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """Last token of the requests `b`, with `accepted` drafts. Shape: [R]."""
    logits, vocab_size = step.logits, step.vocab_size
    own = step.sampling.take(b)
    inv_t = own.inverse_temperature()
    state = rows.state[row]
    plain = accepted == step.num_drafts[b]
    own_mass = mass[b, accepted]
    # Rounding can reject a draft even if p = q. Then the residual is empty: draw from p.
    lost = ~plain & (own_mass.sum(-1) == 0)
    if bool(lost.any()):
        x = blocks_reference(logits[row], vocab_size)
        ids = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
        p = log_prob_reference(x, ids, state, inv_t).exp()
        own_mass = torch.where(lost[:, None], (p * FIXED_ONE).long().sum(-1), own_mass)
    from_stats = plain & ~own.is_filtered(vocab_size)
    plain_mass = _block_mass_reference(stats, rows, row, inv_t)
    own_mass = torch.where(from_stats[:, None], plain_mass, own_mass)
    if step.words is None:
        start, zero = step.anchor[b], torch.zeros_like(b)
        offset = step.position[b] - start + accepted
        w = philox_reference(own.seed, start, offset, torch.full_like(b, step.purpose), zero)
    else:
        w0, w1, w2, w3 = step.words[b, -1].unbind(-1)
        w = (w0, w1, w2, w3)
    block = _choose(own_mass, pick_reference(w[0], w[1], own_mass.sum(-1)))

    ids = block[:, None] * BLOCK + torch.arange(block_width(vocab_size), device=logits.device)
    inside = ids < vocab_size
    x = logits[row[:, None], ids.clamp_max(vocab_size - 1)].float()
    x = torch.where(inside, x, -torch.inf)
    width = min(step.draft_logits.shape[-1], vocab_size)
    draft = step.draft_logits[b[:, None], accepted[:, None], ids.clamp_max(width - 1)].float()
    draft = torch.where(ids < width, draft, -torch.inf)
    weight = weights_reference(
        x, ids, state, draft, step.draft_state[b, accepted], step.draft_ids[b, accepted],
        ~plain & ~lost, decision.log_scale[b, accepted], inv_t,
    )  # fmt: skip
    # Plain rows are normalised by their block, so that few bits are lost in a light one.
    block_max = stats.max[row].gather(1, block[:, None])
    block_total = stats.total[row].gather(1, block[:, None])
    block_w = torch.exp((x - block_max) * inv_t[:, None]) / block_total
    weight = torch.where(from_stats[:, None], (block_w * FIXED_ONE).long(), weight)
    inner = _choose(weight, pick_reference(w[2], w[3], weight.sum(-1)))
    return ids.gather(1, inner[:, None]).squeeze(1).clamp_max(vocab_size - 1)


def _choose(weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose inclusive prefix sum exceeds the target. Shape: [R, n], [R] -> [R]."""
    index = (weight.cumsum(-1) <= target[:, None]).sum(-1)
    return index.clamp_max(weight.shape[1] - 1)


@triton.jit
def draw_words(request, j, num_columns, seed, anchor, position, step):
    """Random words of the token after j drafts; `position` is that of a request's row 0."""
    if step.words is None:
        one = tl.full((), 1, tl.int32)
        purpose: tl.constexpr = _FINAL if step.offset is None else _DRAFT
        words = philox(
            seed, anchor.to(tl.int32), (position - anchor + j).to(tl.int32), one * purpose,
            one - one,
        )  # fmt: skip
    else:
        at = step.words + (request * (num_columns + 1) + num_columns) * 4
        w0, w1 = tl.load(at).to(tl.uint32), tl.load(at + 1).to(tl.uint32)
        words = w0, w1, tl.load(at + 2).to(tl.uint32), tl.load(at + 3).to(tl.uint32)
    return words


@triton.jit
def pick_block(mass, num_blocks, words):
    """Choose a block of a row by the blocks' masses."""
    below = tl.cumsum(mass, 0) <= pick(words[0], words[1], tl.sum(mass, 0))
    return tl.minimum(tl.sum(below.to(tl.int32), 0), num_blocks - 1)


@triton.jit
def pick_token(block, weight, vocab_size, words):
    """Choose a token of a block by the tokens' weights."""
    # First among sums of groups, then within one: two short scans instead of a long one.
    part: tl.constexpr = _BLOCK // 32
    by_group = tl.reshape(weight, (part, 32))
    mass = tl.sum(by_group, 1)
    target = pick(words[2], words[3], tl.sum(mass, 0))
    prefix = tl.cumsum(mass, 0)
    group = tl.minimum(tl.sum((prefix <= target).to(tl.int32), 0), part - 1)
    here = tl.arange(0, part) == group
    target -= tl.sum(tl.where(here, prefix - mass, 0), 0)
    inner = tl.cumsum(tl.sum(tl.where(here[:, None], by_group, 0), 0), 0)
    token = block * _BLOCK + group * 32 + tl.sum((inner <= target).to(tl.int32), 0)
    return tl.minimum(token, vocab_size - 1).to(tl.int64)


@triton.jit
def draw_from_sums(block_max, total, row_ptr, state, inv_t, num_blocks, vocab_size, words):
    """Draw a token of an unfiltered row from p, with the block sums that the scan has left."""
    row_max, log_z, _threshold, _cutoff = state
    block = pick_block(fixed(total * exp((block_max - row_max) * inv_t - log_z)), num_blocks, words)
    ids = block * _BLOCK + tl.arange(0, _BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    weight = exp((x - row_max) * inv_t - log_z)
    # Normalised within the block, so that a light block loses few bits.
    return pick_token(block, fixed(weight / tl.sum(weight, 0)), vocab_size, words)


@triton.jit
def draw_from_candidates(
    row, candidates_ptr, num_candidates, vocab_size, inv_t, words, HAS_Q: tl.constexpr
):
    """Draw a token from max(p - q, 0), or from p; every token that p keeps is a candidate."""
    ids, x = load_candidates(candidates_ptr, num_candidates)
    y = load_draft_logits(ids, row, HAS_Q)
    weight = fixed(token_weights(x, y, ids, row, inv_t, HAS_Q))
    if tl.sum(weight, 0) == 0:
        weight = fixed(probs(x, ids, row[2], 0.0, inv_t))
    # The same token as choosing a block first, and then a token inside it.
    prefix = tl.cumsum(weight, 0)
    chosen = prefix > pick(words[0], words[1], tl.sum(weight, 0))
    block = tl.min(tl.where(chosen, ids // _BLOCK, 0x7FFFFFFF), 0)
    here = ids // _BLOCK == block
    before = tl.sum(tl.where(ids // _BLOCK < block, weight, 0), 0)
    target = before + pick(words[2], words[3], tl.sum(tl.where(here, weight, 0), 0))
    token = tl.min(tl.where(here & (prefix > target), ids, 0x7FFFFFFF), 0)
    return tl.minimum(token, vocab_size - 1).to(tl.int64)


@triton.jit
def draw_from_blocks(
    row, mass_ptr, num_blocks, vocab_size, inv_t, words, HAS_Q: tl.constexpr, NB: tl.constexpr
):
    """Draw a token of a row that was read again, with the masses of its blocks."""
    lane = tl.arange(0, NB)
    mass = tl.load(mass_ptr + lane, mask=lane < num_blocks, other=0)
    lost = tl.sum(mass, 0) == 0
    row = without_draft(lost, row)
    if lost:
        # Rounding can reject a draft even if p = q. Then the residual is empty: draw from p.
        read_blocks(mass_ptr, 0, 1, num_blocks, row, vocab_size, inv_t, HAS_Q)
        tl.debug_barrier()
        mass = tl.load(mass_ptr + lane, mask=lane < num_blocks, other=0)
    block = pick_block(mass, num_blocks, words)
    loaded = load_block(block, row, HAS_Q)
    weight = block_weights(block, loaded, row, vocab_size, inv_t, HAS_Q)
    return pick_token(block, fixed(weight), vocab_size, words)

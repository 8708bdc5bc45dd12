"""Speculative verification and sampling. Every emitted token comes from here.

    scan        K1   reads every row once, for the maxima and sums of exponentials of its blocks
    row_state   K1b  one program a row: its state, the test of its draft and, mostly, its own token;
                     a request whose rows all have one is done
    bisection        the same, for filtered rows that are too flat for row_state
    finish      K2   reads the rows that are still open once more, and draws from them

The last two are launched only if a request may need them. A request without drafts is sampled
plainly: verification with k = 0. So is a draft drawn from the draft model's logits (K0). Each
kernel may start while the one before it ends, except the scan, which waits for everything before.
"""

import torch

from .._dispatch import uses_triton
from . import cpu
from .bisection import bisect_rows
from .decide import decide_reference
from .drafts import Drafts, DraftSample, Step, Verified
from .draw import draw_reference
from .finish import finish
from .philox import Purpose
from .residual import residual_reference
from .row_outcome import RowOutcomes
from .row_state import row_state, row_state_reference
from .sampling import MAX_DRAFTS, STATE_WIDTH, Sampling
from .scan import scan, scan_reference


def draft_sample(
    logits: torch.Tensor,
    sampling: Sampling,
    position: torch.Tensor,
    anchor: torch.Tensor,
    vocab_size: int,
    filters: bool = True,
    samples: bool = True,
    words: torch.Tensor | None = None,
) -> DraftSample:
    """Draw one draft a row from the processed distribution of the draft's logits.

    A row with NaN, inf or no finite logit gives token 0 and a state whose log_z is NaN. `verify`
    treats that as a one-hot draft, which is still lossless.

    Parameters
    ----------
    logits
        Raw draft logits. Shape: [N, V'], float32, float16 or bfloat16, rows may be strided.
    sampling
        The parameters of each row's request. Shape: [N] each.
    position
        Absolute index of the token being drawn. Shape: [N] int64.
    anchor
        Position of the step's first draft. Shape: [N] int64.
    vocab_size
        Ids from here on are never drawn; V' may be smaller.
    filters
        False promises that no request filters (top-k, top-p, min-p), and saves launches.
    samples
        False promises that every request is greedy, and saves launches.
    words
        Random words to use instead of Philox's, for proofs. Shape: [N, 2, 4] int64.
    """
    vocab_size = min(vocab_size, logits.shape[1])
    drafts = Drafts(
        sampling.seed.new_empty(len(logits), 0), sampling.rule.new_empty(0), None, None, None
    )
    step = Step(logits, None, drafts, sampling, anchor, position, Purpose.DRAFT, vocab_size, words)
    if cpu.takes(logits):
        return cpu.draw(step)
    verified, state = _sample(step, filters, samples)
    return DraftSample(verified.token_ids[:, 0], state)


def verify(
    target_logits: torch.Tensor,
    cu_rows: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_state: torch.Tensor | None,
    sampling: Sampling,
    positions: torch.Tensor,
    vocab_size: int,
    filters: bool = True,
    samples: bool = True,
    words: torch.Tensor | None = None,
    draft_rows: torch.Tensor | None = None,
) -> Verified:
    """Keep the drafts that each request's rule accepts, and draw the token after them.

    Every emitted token is distributed as the target's processed distribution, whatever the rule
    and the drafts. A request without drafts is sampled plainly.

    Parameters
    ----------
    target_logits
        Raw target logits. Request i has the k_i + 1 rows cu_rows[i]:cu_rows[i + 1]; its row j holds
        the logits after j drafts. Shape: [T, V], float32, float16 or bfloat16.
    cu_rows
        Shape: [B + 1] int32. Rows from cu_rows[B] on are padding.
    draft_token_ids
        Shape: [B, K] int64, K in 0..32; entries from num_drafts on are ignored.
    num_drafts
        k_i. Shape: [B] int32.
    draft_logits
        Raw draft logits that the drafts were drawn from; None: one-hot drafts. Shape: [B, K, V'].
    draft_state
        The states that `draft_sample` returned with them. Shape: [B, K, 4] float32.
    sampling
        Shape: [B] each.
    positions
        Absolute position of the first token to be emitted. Shape: [B] int64.
    vocab_size
        Ids from here on are never emitted. At most V.
    filters
        False promises that no request filters (top-k, top-p, min-p), and saves launches.
    samples
        False promises that every request is greedy, and saves launches.
    words
        Random words to use instead of Philox's, for proofs: row i < K for the test of draft i,
        row K + 1 for the last draw. `match` ignores them. Shape: [B, K + 2, 4] int64.
    draft_rows
        Index of each request's entry in draft_logits and draft_state, which may have more entries
        than there are requests; None: they are in order. Shape: [B] of any integers.
    """
    if draft_token_ids.shape[1] > MAX_DRAFTS:
        raise ValueError(f"{draft_token_ids.shape[1]} drafts a request; at most {MAX_DRAFTS}")
    if vocab_size > target_logits.shape[1]:
        raise ValueError(
            f"vocab_size {vocab_size} exceeds the {target_logits.shape[1]} target logits of a row"
        )
    drafts = Drafts(draft_token_ids, num_drafts, draft_logits, draft_state, draft_rows)
    step = Step(
        target_logits, cu_rows, drafts, sampling, positions, positions, Purpose.FINAL, vocab_size,
        words,
    )  # fmt: skip
    if cpu.takes(target_logits, draft_logits):
        return cpu.verify(step)
    return _sample(step, filters, samples)[0]


def _sample(step: Step, filters: bool, samples: bool) -> tuple[Verified, torch.Tensor]:
    """The requests' outcomes and the rows' states."""
    if not uses_triton(step.logits):
        return _sample_reference(step)
    _check_layout(step)
    batch, k_max = step.drafts.token_ids.shape
    if k_max == 0 and step.cu_rows is not None:  # the kernels that draw drafts do this too
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
    verified = Verified(
        new((batch, k_max + 1), dtype=torch.int64),
        new(batch, dtype=torch.int32),
        new(batch, dtype=torch.bool),
    )
    filters = filters and samples
    stats = scan(step.logits, step.cu_rows, step.sampling, step.vocab_size, rows.counters)
    row_state(step, stats, filters, rows, verified)
    if filters:
        bisect_rows(step, stats, rows, verified)
    if samples and (filters or k_max > 0):
        finish(step, stats.max.shape[1], rows, verified)
    return verified, rows.state


def _sample_reference(step: Step) -> tuple[Verified, torch.Tensor]:
    logits, drafts, cu_rows = step.logits, step.drafts.in_order(), step.cu_rows
    if cu_rows is None:
        cu_rows = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
        drafts = drafts._replace(num_drafts=torch.zeros_like(step.sampling.rule))
    step = step._replace(logits=logits[: int(cu_rows[-1])], cu_rows=cu_rows, drafts=drafts)
    of_row = step.sampling.take(torch.repeat_interleave(drafts.num_drafts.long() + 1))
    stats = scan_reference(step.logits, of_row, step.vocab_size)
    rows = row_state_reference(step.logits, stats, of_row, step.vocab_size)
    decision = decide_reference(step, rows)
    mass = residual_reference(step, rows, decision)
    return draw_reference(step, stats, rows, decision, mass), rows.state


def _check_layout(step: Step) -> None:
    """Refuse strided tensors: the kernels assume dense ones and would read the wrong elements."""
    logits, drafts, sampling = step.logits, step.drafts, step.sampling
    vectors = (*sampling, step.anchor, step.position, drafts.num_drafts)
    assert logits.stride(1) == 1, "logits: the vocabulary must be the dense dimension"
    assert all(x.stride(0) == 1 or len(x) == 1 for x in vectors)
    assert drafts.token_ids.stride(1) == 1 or drafts.token_ids.shape[1] < 2
    assert drafts.logits is None or drafts.logits.stride(2) == 1
    assert drafts.state is None or drafts.state.is_contiguous(), "draft_state must be contiguous"
    assert drafts.state is None or drafts.token_ids.shape[1] in (0, drafts.state.shape[1])
    assert drafts.rows is None or drafts.rows.is_contiguous(), "draft_rows must be contiguous"

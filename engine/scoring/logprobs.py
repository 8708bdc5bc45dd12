"""Raw logprobs: of prompt tokens, from the logits of prefill chunks, and as outputs list them."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.kernels.verify.logprobs import Logprobs, gather_logprobs, logprobs_at

from ..api import TokenLogprobs
from ..plan import Plan, ScheduledRequest
from ..state.host_copy import on_host, uploaded
from ..state.ragged import ragged_arange

_ROWS_AT_ONCE = 64  # bounds the temporary memory


def score_prompts(plan: Plan, logits: Tensor, num_logits_np: np.ndarray, vocab_size: int) -> Tensor:
    """Start copying prompt logprobs to the host, without waiting; returns the rows to sample from.

    Parameters
    ----------
    logits
        num_logits[i] rows of sequence i: first those that score its prompt, if it asks for prompt
        logprobs, then those that it draws from. At least one scores a prompt. Its rows are
        overwritten. Shape: [sum(num_logits), V].
    num_logits_np
        Shape: [B].
    """
    ends_np = np.cumsum(num_logits_np)
    num_prompt_np = np.array([s.num_prompt_logits for s in plan.scheduled])
    starts_np = ends_np - num_logits_np
    for i in np.flatnonzero(num_prompt_np):
        rows = logits[starts_np[i] : starts_np[i] + num_prompt_np[i], :vocab_size]
        plan.scheduled[i].prompt_scores = _score(plan.scheduled[i], rows)
    sampled_np = ragged_arange(starts_np + num_prompt_np, num_logits_np - num_prompt_np)
    # Most are of decoding sequences, which come first, and stay where they are: a copy of all
    # would double the memory of the largest step.
    first = starts_np[num_prompt_np.nonzero()[0][0]]
    moved = logits[uploaded(sampled_np[first:], logits.device)]
    logits[first : len(sampled_np)] = moved
    return logits[: len(sampled_np)]


def read_prompt_logprobs(plan: Plan) -> None:
    """Enter in the plan what `score_prompts` copied; the device must be done with it."""
    for scheduled in plan.scheduled:
        if scheduled.prompt_scores is not None:
            scheduled.prompt_logprobs = to_entries(*scheduled.prompt_scores)


def with_named(
    found: Logprobs, logits: Tensor, token_ids: Tensor, named: list[tuple[int, ...]], seq: Tensor
) -> Logprobs:
    """The same, but in rows of sequences that name ids, those in place of the best.

    Parameters
    ----------
    logits, token_ids
        As `found` was gathered from. Shape: [N, V], [N].
    named
        The ids of each sequence; none: its rows stay as they are.
    seq
        row -> sequence. Shape: [N].
    """
    num_named = max(map(len, named))
    ids_np = np.zeros((len(named), num_named), dtype=np.int64)
    for i, ids in enumerate(named):
        ids_np[i, : len(ids)] = ids
    wanted = uploaded(ids_np, logits.device)[seq]
    is_named = uploaded(np.array([[bool(ids)] for ids in named]), logits.device)[seq]
    logprobs = logprobs_at(logits, token_ids, found.logprob, wanted)
    num_more = max(0, num_named - found.top_ids.shape[1])
    top_ids, top = (pad(field, (0, num_more)) for field in (found.top_ids, found.top_logprobs))
    top_ids[:, :num_named] = torch.where(is_named, wanted, top_ids[:, :num_named])
    top[:, :num_named] = torch.where(is_named, logprobs, top[:, :num_named])
    return Logprobs(found.logprob, top_ids, top)


def to_entries(
    own_np: np.ndarray,
    top_ids_np: np.ndarray,
    top_np: np.ndarray,
    ranks_np: np.ndarray | None = None,
    *,
    num_top: int | None = None,
) -> list[TokenLogprobs]:
    """Rows of Logprobs, and ranks, as entries; keeps the first `num_top` alternatives of n.

    Shape: [N], [N, n], [N, n], [N].
    """
    ranks = [None] * len(own_np) if ranks_np is None else ranks_np.tolist()
    top_ids, top = top_ids_np[:, :num_top].tolist(), top_np[:, :num_top].tolist()
    return [
        TokenLogprobs(logprob, list(zip(row_ids, row, strict=True)), rank)
        for logprob, row_ids, row, rank in zip(own_np.tolist(), top_ids, top, ranks, strict=True)
    ]


def _score(scheduled: ScheduledRequest, logits: Tensor) -> list[np.ndarray]:
    """Logprobs and ranks of the prompt tokens that follow these rows; logits: [N, V]."""
    request = scheduled.request
    first = max(request.memory.num_computed_tokens, request.num_scored_tokens) + 1
    token_ids_np = np.array(request.token_ids[first : first + len(logits)])
    num_top = min(request.params.prompt_logprobs or 0, logits.shape[1])
    return on_host(*gather(logits, uploaded(token_ids_np, logits.device), num_top))


def gather(logits: Tensor, token_ids: Tensor, num_top: int) -> list[Tensor]:
    """Logprobs and rank of one token in each row. Shape: [N, V], [N]."""
    gathered = [
        (*gather_logprobs(rows, ids, num_top, rows.shape[1]), _ranks(rows, ids))
        for rows, ids in zip(
            logits.split(_ROWS_AT_ONCE), token_ids.split(_ROWS_AT_ONCE), strict=True
        )
    ]
    return [torch.cat(pieces) for pieces in zip(*gathered, strict=True)]


def _ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Rank of each token id, from 1, in order of (logit descending, id ascending); -> [N]."""
    own = logits.gather(1, token_ids[:, None])
    lower_id = torch.arange(logits.shape[1], device=logits.device) < token_ids[:, None]
    return 1 + ((logits > own) | ((logits == own) & lower_id)).sum(-1)

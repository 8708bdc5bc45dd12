"""Raw logprobs of prompt tokens, read off the logits of prefill chunks."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.verify.logprobs import gather_logprobs

from ..api import TokenLogprobs
from ..scheduling.plan import Plan, ScheduledRequest
from ..state.host_copy import HostCopy, uploaded
from ..state.ragged import ragged_arange

ROWS_AT_ONCE = 64  # bounds what stands beside the logits themselves


def score_prompts(plan: Plan, logits: Tensor, num_logits_np: np.ndarray, vocab_size: int) -> Tensor:
    """Send each sequence's share of prompt logprobs on its way to the host; returns the rows that
    are for sampling. The host waits for nothing.

    Parameters
    ----------
    logits
        Of sequence i the last num_logits[i] rows: first those of its prompt, if it asks for them,
        then those that it samples from. Shape: [sum(num_logits), V].
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
    return logits[uploaded(sampled_np, logits.device)]


def read_prompt_logprobs(plan: Plan) -> None:
    """Fill in what `score_prompts` sent, once it is on the host."""
    for scheduled in plan.scheduled:
        if scheduled.prompt_scores is not None:
            scheduled.prompt_logprobs = to_entries(*scheduled.prompt_scores.arrays())


def to_entries(
    own_np: np.ndarray,
    top_ids_np: np.ndarray,
    top_np: np.ndarray,
    ranks_np: np.ndarray | None = None,
    *,
    num_top: int | None = None,
) -> list[TokenLogprobs]:
    """Rows of Logprobs, and of ranks. Shape: [N], [N, n], [N, n], [N]; of n the first num_top."""
    ranks = [None] * len(own_np) if ranks_np is None else ranks_np.tolist()
    top_ids, top = top_ids_np[:, :num_top].tolist(), top_np[:, :num_top].tolist()
    return [
        TokenLogprobs(logprob, list(zip(row_ids, row, strict=True)), rank)
        for logprob, row_ids, row, rank in zip(own_np.tolist(), top_ids, top, ranks, strict=True)
    ]


def _score(scheduled: ScheduledRequest, logits: Tensor) -> HostCopy:
    """Logprobs and ranks of the prompt tokens that these rows predict; logits: [N, V]."""
    request = scheduled.request
    first = max(request.num_computed_tokens, request.num_scored_tokens) + 1
    token_ids_np = np.array(request.token_ids[first : first + len(logits)])
    num_top = min(request.params.prompt_logprobs or 0, logits.shape[1])
    return HostCopy(*gather(logits, uploaded(token_ids_np, logits.device), num_top))


def gather(logits: Tensor, token_ids: Tensor, num_top: int) -> list[Tensor]:
    """Logprobs and ranks of the tokens that the rows predict. Shape: [N, V], [N]."""
    gathered = [
        (*gather_logprobs(rows, ids, num_top, rows.shape[1]), _ranks(rows, ids))
        for rows, ids in zip(logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True)
    ]
    return [torch.cat(pieces) for pieces in zip(*gathered, strict=True)]


def _ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """1 + how many ids come before each one by (logit descending, id ascending); -> [N]."""
    own = logits.gather(1, token_ids[:, None])
    lower_id = torch.arange(logits.shape[1], device=logits.device) < token_ids[:, None]
    return 1 + ((logits > own) | ((logits == own) & lower_id)).sum(-1)

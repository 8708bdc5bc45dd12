"""Raw logprobs of prompt tokens, read off the logits of prefill chunks."""

import numpy as np
import torch
from torch import Tensor

from outrider.engine.api import TokenLogprobs
from outrider.engine.plan import Plan, ScheduledRequest
from outrider.engine.ragged import ragged_arange
from outrider.kernels.logprobs import gather_logprobs

ROWS_AT_ONCE = 64  # bounds what stands beside the logits themselves


def read_prompt_logprobs(
    plan: Plan, logits: Tensor, num_logits_np: np.ndarray, vocab_size: int
) -> Tensor:
    """Fill in each sequence's share of prompt logprobs; returns the rows that are for sampling.

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
        plan.scheduled[i].prompt_logprobs = _score(plan.scheduled[i], rows)
    sampled_np = ragged_arange(starts_np + num_prompt_np, num_logits_np - num_prompt_np)
    return logits[torch.from_numpy(sampled_np).to(logits.device)]


def _score(scheduled: ScheduledRequest, logits: Tensor) -> list[TokenLogprobs]:
    """Logprobs of the prompt tokens that these rows predict; logits: [N, V]."""
    request = scheduled.request
    first = max(request.num_computed_tokens, request.num_scored_tokens) + 1
    token_ids = torch.tensor(request.token_ids[first : first + len(logits)], device=logits.device)
    num_top = min(request.params.prompt_logprobs or 0, logits.shape[1])
    entries = []
    for rows, ids in zip(logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True):
        gathered = gather_logprobs(rows, ids, num_top, rows.shape[1])
        own, top_ids, top = (field.tolist() for field in gathered)
        for logprob, row_ids, row, rank in zip(
            own, top_ids, top, _ranks(rows, ids).tolist(), strict=True
        ):
            entries.append(TokenLogprobs(logprob, list(zip(row_ids, row, strict=True)), rank))
    return entries


def _ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """1 + how many ids come before each one by (logit descending, id ascending); -> [N]."""
    own = logits.gather(1, token_ids[:, None])
    lower_id = torch.arange(logits.shape[1], device=logits.device) < token_ids[:, None]
    return 1 + ((logits > own) | ((logits == own) & lower_id)).sum(-1)

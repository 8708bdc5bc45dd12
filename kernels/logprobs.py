"""Raw logprobs of emitted tokens and of the best alternatives, in a deterministic order."""

from typing import NamedTuple

import torch


class Logprobs(NamedTuple):
    logprob: torch.Tensor  # [N] float32
    top_ids: torch.Tensor  # [N, n] int64, (logprob descending, id ascending)
    top_logprobs: torch.Tensor  # [N, n] float32


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, vocab_size: int
) -> Logprobs:
    """Log-softmax of raw logits at `token_ids` and at the `num_top` best ids of each row.

    The token's own value and its entry among the best are the same float.

    Parameters
    ----------
    logits
        Shape: [N, V], float32, float16 or bfloat16.
    token_ids
        Shape: [N] int64.
    num_top
        Alternatives a row, 0..vocab_size.
    vocab_size
        Ids from here on do not exist. At most V.
    """
    return logprobs_reference(logits, token_ids, num_top, vocab_size)


def logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, vocab_size: int
) -> Logprobs:
    x = logits[:, :vocab_size].float()
    row_max = x.amax(-1)
    log_z = torch.exp(x - row_max[:, None]).sum(-1, dtype=torch.float64).log().float()
    base = row_max + log_z
    top = x.topk(num_top, sorted=True).values
    if num_top:
        # topk leaves the order of equals open. Ids above the last value come first, its ties by id.
        better = (x > top[:, -1:]).int()
        tied = (x == top[:, -1:]).int()
        room = num_top - better.sum(-1, keepdim=True)
        chosen = better.bool() | (tied.bool() & (tied.cumsum(-1) <= room))
        ids = chosen.nonzero()[:, 1].view(-1, num_top)
        order = x.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
        top_ids = ids.gather(1, order)
    else:
        top_ids = torch.zeros(len(x), 0, dtype=torch.int64, device=x.device)
    return Logprobs(
        x.gather(1, token_ids[:, None]).squeeze(1) - base,
        top_ids,
        x.gather(1, top_ids) - base[:, None],
    )

"""What the target says of its own text: at every position, its likeliest next tokens.

The target reads each conversation once, alone, so that training may go over the text as often as
it likes at the draft's small price. Only answers count: nobody drafts for what users type.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .text import Conversation

NUM_TOP = 64  # tokens kept of each distribution


@dataclass(slots=True)
class Lessons:
    """Conversations, one behind the other, on the device that trains; T tokens in all."""

    token_ids: Tensor  # [T] int32
    conversation_of: Tensor  # [T] int32
    top_ids: Tensor  # [T, K] int32, likeliest first
    top_log_probs: Tensor  # [T, K] bfloat16
    is_answered: Tensor  # [T] bool: the token that follows is one of the target's answer
    starts_np: np.ndarray  # [conversations] int64
    lengths_np: np.ndarray  # [conversations] int64
    states: Tensor | None = None  # [T, m, hidden], the target's, for heads


@torch.inference_mode()
def read(
    target: PreTrainedModel,
    conversations: list[Conversation],
    batch_tokens: int,
    report: Callable[[int, int], None] = lambda done, total: None,
    boundaries: tuple[int, ...] = (),
) -> Lessons:
    """The target's distributions over the conversations, in batches of about `batch_tokens`.

    Its hidden states before the layers of `boundaries` are kept too.
    """
    device = target.device
    lengths_np = np.array([len(c.token_ids) for c in conversations], dtype=np.int64)
    starts_np = np.cumsum(lengths_np) - lengths_np
    num_tokens = int(lengths_np.sum())
    offset_np = np.arange(num_tokens) - np.repeat(starts_np, lengths_np)
    answer_np = np.array([c.num_prompt_tokens for c in conversations], dtype=np.int64)
    is_answered_np = (offset_np >= np.repeat(answer_np - 1, lengths_np)) & (
        offset_np < np.repeat(lengths_np - 1, lengths_np)
    )
    conversation_of_np = np.repeat(np.arange(len(lengths_np), dtype=np.int32), lengths_np)
    num_top = min(NUM_TOP, target.config.get_text_config().vocab_size)
    lessons = Lessons(
        torch.cat([c.token_ids for c in conversations]).to(device, torch.int32),
        torch.from_numpy(conversation_of_np).to(device),
        torch.empty(num_tokens, num_top, dtype=torch.int32, device=device),
        torch.empty(num_tokens, num_top, dtype=torch.bfloat16, device=device),
        torch.from_numpy(is_answered_np).to(device),
        starts_np,
        lengths_np,
    )
    if boundaries:
        width = target.config.get_text_config().hidden_size
        lessons.states = torch.empty(
            num_tokens, len(boundaries), width, dtype=target.dtype, device=device
        )
    # Conversations of about the same length together, padded at the end: causal models ignore that.
    by_length = np.argsort(-lengths_np, kind="stable")
    done = 0
    while done < len(by_length):
        # Longest first: so memory runs out in the first batch, or never.
        width = int(lengths_np[by_length[done]])
        batch = by_length[done : done + max(1, batch_tokens // width)]
        offsets = torch.arange(width, device=device)
        lengths = torch.from_numpy(lengths_np[batch]).to(device)
        positions = torch.from_numpy(starts_np[batch]).to(device)[:, None] + offsets
        is_token = offsets < lengths[:, None]
        ids = lessons.token_ids[positions.clamp_max(num_tokens - 1)].long()
        outputs = target(ids, use_cache=False, output_hidden_states=bool(boundaries))
        logits = outputs.logits.flatten(0, 1)
        top, top_ids = logits.topk(num_top, dim=-1)
        log_probs = top.float() - log_sum(logits)
        is_row = is_token.flatten()
        lessons.top_ids[positions[is_token]] = top_ids[is_row].int()
        lessons.top_log_probs[positions[is_token]] = log_probs[is_row].bfloat16()
        if lessons.states is not None:
            states = torch.stack([outputs.hidden_states[b] for b in boundaries], 2)
            lessons.states[positions[is_token]] = states[is_token]
        done += len(batch)
        report(done, len(by_length))
    return lessons


def log_sum(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))) of each row in float32: [N, V] -> [N, 1]."""
    return (_fused_log_sum() if logits.is_cuda else _log_sum)(logits)


def _log_sum(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(-1, keepdim=True)


@functools.cache
def _fused_log_sum() -> Callable[[Tensor], Tensor]:
    """Reads the logits, where op by op they are first written out in float32."""
    return torch.compile(_log_sum, dynamic=True)

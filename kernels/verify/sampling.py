"""Shared by all verification kernels: sampling parameters, row states, block size."""

from enum import IntEnum
from typing import NamedTuple

import torch

from ..triton_or_none import tl, triton

# Both change which token a seed draws, so they are never tuned.
BLOCK = 1024  # tokens of one block of a row
GROUP = 64  # tokens of one group; the groups' maxima narrow searches
MAX_DRAFTS = 32

# Columns of a row state, which turns raw logits into log-probabilities (log_prob_reference).
STATE_MAX, STATE_LOG_Z, STATE_THRESHOLD, STATE_CUTOFF = range(4)
STATE_WIDTH = 4


class Rule(IntEnum):
    """How a request's drafts are verified. Greedy requests ignore it."""

    TOKEN = 0
    BLOCK = 1
    MATCH = 2


class Sampling(NamedTuple):
    """Sampling parameters on the logits' device, one entry a slot (or, in references, a request).

    Passed whole to kernels.
    """

    temperature: torch.Tensor  # [B] float32, 0 = greedy
    top_k: torch.Tensor  # [B] int32, 0 = off
    top_p: torch.Tensor  # [B] float32, 1 = off
    min_p: torch.Tensor  # [B] float32, 0 = off
    seed: torch.Tensor  # [B] int64, the bits of the request's uint64 key
    rule: torch.Tensor  # [B] int32, a Rule

    def take(self, index: torch.Tensor) -> "Sampling":
        return Sampling(*(field[index] for field in self))

    def inverse_temperature(self) -> torch.Tensor:
        return 1.0 / torch.where(self.temperature > 0, self.temperature, 1.0)

    def is_filtered(self, vocab_size: int) -> torch.Tensor:
        top_k = (self.top_k > 0) & (self.top_k < vocab_size)
        return (self.temperature > 0) & (top_k | (self.top_p < 1) | (self.min_p > 0))


class RowStates(NamedTuple):
    """For the references; the kernels keep only `state`."""

    state: torch.Tensor  # [N, 4] float32 (max, log_z, threshold, cutoff); log_z NaN: a bad row
    argmax: torch.Tensor  # [N] int64 token id; -1: a bad row


def num_blocks(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK)


def block_width(vocab_size: int) -> int:
    """Width of a block in the references, which do not pad a vocabulary of less than a block."""
    return min(BLOCK, vocab_size)


def log_prob_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, state: torch.Tensor, inv_t: torch.Tensor
) -> torch.Tensor:
    """Processed log-probability of raw logits: (l - max) / temperature - log_z, or -inf.

    A row keeps the logits above `threshold`, and those equal to it up to token id `cutoff`. That is
    a prefix of the order (logit descending, id ascending): what top-k, top-p and min-p leave.

    Shape: logits and token_ids broadcast together; state [..., 4] and inv_t [...] have one entry a
    row, and the row dimensions of logits come first.
    """
    lead = state.shape[:-1] + (1,) * (logits.ndim - state.ndim + 1)
    row_max, log_z, threshold, cutoff = (state[..., i].reshape(lead) for i in range(STATE_WIDTH))
    value = (logits - row_max) * inv_t.reshape(lead) - log_z
    if not bool((threshold > -torch.inf).any()):  # nothing is filtered: masks would be slow
        return value
    kept = (logits > threshold) | ((logits == threshold) & (token_ids <= cutoff))
    return torch.where(kept & (logits > -torch.inf), value, -torch.inf)


@triton.jit
def load_state(state_ptr, mask):
    """Columns of a row state; where masked, those of a one-hot distribution."""
    row_max = tl.load(state_ptr, mask=mask, other=0.0)
    log_z = tl.load(state_ptr + 1, mask=mask, other=float("nan"))
    threshold = tl.load(state_ptr + 2, mask=mask, other=-float("inf"))
    return row_max, log_z, threshold, tl.load(state_ptr + 3, mask=mask, other=0.0)


@triton.jit
def store_state(state_ptr, state):
    row_max, log_z, threshold, cutoff = state
    tl.store(state_ptr, row_max)
    tl.store(state_ptr + 1, log_z)
    tl.store(state_ptr + 2, threshold)
    tl.store(state_ptr + 3, cutoff)


@triton.jit
def log_prob(logits, token_ids, row_max, log_z, threshold, cutoff, inv_t):
    kept = (logits > threshold) | ((logits == threshold) & (token_ids <= cutoff.to(tl.int32)))
    return tl.where(kept, (logits - row_max) * inv_t - log_z, -float("inf"))


@triton.jit
def is_filtered(slot, sampling, vocab_size):
    top_k = tl.load(sampling.top_k + slot)
    by_k = (top_k > 0) & (top_k < vocab_size)
    by_p = (tl.load(sampling.top_p + slot) < 1.0) | (tl.load(sampling.min_p + slot) > 0.0)
    return (tl.load(sampling.temperature + slot) > 0.0) & (by_k | by_p)

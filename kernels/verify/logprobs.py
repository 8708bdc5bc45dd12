"""Raw logprobs of given tokens and of the best alternatives, in a fixed order."""

from typing import NamedTuple

import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from .keys import key_of, value_of
from .sampling import BLOCK, GROUP
from .scan import load_stats, merge_max, merge_totals, scan

_NO_TOKEN = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below every token; its key is _NO_KEY
_NO_KEY = tl.constexpr(-0x80000000)


class Logprobs(NamedTuple):
    logprob: torch.Tensor  # [N] float32
    top_ids: torch.Tensor  # [N, n] int64, (logprob descending, id ascending)
    top_logprobs: torch.Tensor  # [N, n] float32


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, vocab_size: int
) -> Logprobs:
    """Log-softmax of raw logits at `token_ids` and at the `num_top` best ids of each row.

    The best are in the order (logit descending, id ascending). If the token itself is among them,
    its entry there is the same float.

    Parameters
    ----------
    logits
        Shape: [N, V], float32, float16 or bfloat16.
    token_ids
        Shape: [N] int64; the logprob of an id outside the vocabulary (padding) is arbitrary.
    num_top
        Alternatives a row, 0..vocab_size.
    vocab_size
        Ids from here on do not exist. At most V.
    """
    if not 0 <= num_top <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"num_top {num_top} and vocab_size {vocab_size}: need 0 <= num_top <= vocab_size <= "
            f"{logits.shape[1]}, the logits of a row"
        )
    if not uses_triton(logits):
        return logprobs_reference(logits, token_ids, num_top, vocab_size)
    num_rows, new = len(logits), logits.new_empty
    stats = scan(logits, vocab_size)
    blocks = stats.max.shape[1]
    logprobs = Logprobs(
        new(num_rows, dtype=torch.float32),
        new((num_rows, num_top), dtype=torch.int64),
        new((num_rows, num_top), dtype=torch.float32),
    )
    _logprobs_kernel[(num_rows,)](
        logits, logits.stride(0), vocab_size, stats, blocks, token_ids.contiguous(), num_top,
        *logprobs,
        NB=triton.next_power_of_2(blocks), BLOCK_GROUPS=BLOCK // GROUP, GROUP=GROUP, num_warps=8,
    )  # fmt: skip
    return logprobs


def logprobs_at(
    logits: torch.Tensor, token_ids: torch.Tensor, logprob: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Log-softmax of raw logits at several ids of each row, from that of one of them.

    The entry of that one is the same float.

    Parameters
    ----------
    logits
        Shape: [N, V], float32, float16 or bfloat16.
    token_ids, logprob
        As `gather_logprobs` takes and returns them. Shape: [N].
    wanted
        Shape: [N, m] int64; returns [N, m] float32.
    """
    own = token_ids.clamp(0, logits.shape[1] - 1)[:, None]
    base = logits.gather(1, own).float() - logprob[:, None]
    return torch.where(wanted == own, logprob[:, None], logits.gather(1, wanted).float() - base)


def logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, vocab_size: int
) -> Logprobs:
    x = logits[:, :vocab_size].float()
    # A bad row's logprobs are NaN, and its best are the lowest ids.
    x = torch.where(x.amax(-1, keepdim=True).isfinite(), x, -torch.inf)
    row_max = x.amax(-1)
    log_z = torch.exp(x - row_max[:, None]).sum(-1, dtype=torch.float64).log().float()
    base = row_max + log_z
    top = x.topk(num_top, sorted=True).values
    if num_top:
        # topk returns ties in any order: take what is above the last value, then its ties by id.
        better = (x > top[:, -1:]).int()
        tied = (x == top[:, -1:]).int()
        room = num_top - better.sum(-1, keepdim=True)
        chosen = better.bool() | (tied.bool() & (tied.cumsum(-1) <= room))
        ids = chosen.nonzero()[:, 1].view(-1, num_top)
        # Adding 0.0 turns -0.0 into 0.0: a GPU sorts by bits.
        order = (x.gather(1, ids) + 0.0).sort(dim=-1, descending=True, stable=True).indices
        top_ids = ids.gather(1, order)
    else:
        top_ids = torch.zeros(len(x), 0, dtype=torch.int64, device=x.device)
    return Logprobs(
        x.gather(1, token_ids[:, None].clamp(0, vocab_size - 1)).squeeze(1) - base,
        top_ids,
        x.gather(1, top_ids) - base[:, None],
    )


@triton.jit(do_not_specialize=["num_top"])
def _logprobs_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    vocab_size,
    stats,
    num_blocks,
    token_ids_ptr,  # [N]
    num_top,
    logprob_ptr,  # [N]
    top_ids_ptr,  # [N, num_top]
    top_logprobs_ptr,  # [N, num_top]
    NB: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block_max, total = load_stats(row, stats, num_blocks, NB)
    row_max, bad = merge_max(block_max)
    z = merge_totals(block_max, total, row_max, 1.0)
    base = tl.where(bad, float("nan"), row_max + tl.log(z))
    row_ptr = logits_ptr + row * logits_stride
    token = tl.minimum(tl.maximum(tl.load(token_ids_ptr + row), 0), vocab_size - 1)
    tl.store(logprob_ptr + row, tl.load(row_ptr + token).to(tl.float32) - base)

    group = tl.arange(0, NB * BLOCK_GROUPS)
    row_groups = num_blocks * BLOCK_GROUPS
    exists = group * GROUP < vocab_size
    group_max = tl.load(stats.group_max + row * row_groups + group, mask=exists, other=0.0)
    best_of_group = tl.where(exists, key_of(group_max), _NO_KEY)
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for rank in range(0, num_top):
        # The first group that has the highest token left; in it, the best not yet reported.
        highest = tl.max(best_of_group, 0)
        here = tl.min(tl.where(best_of_group == highest, group, NB * BLOCK_GROUPS - 1), 0)
        ids = here * GROUP + tl.arange(0, GROUP)
        inside = ids < vocab_size
        x = tl.load(row_ptr + ids, mask=inside, other=0.0).to(tl.float32)
        packed = (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        packed = tl.where(inside & (packed < last), packed, _NO_TOKEN)
        best = tl.max(packed, 0)
        rest = tl.max(tl.where(packed < best, packed, _NO_TOKEN), 0)
        best_of_group = tl.where(group == here, (rest >> 32).to(tl.int32), best_of_group)
        last = best
        # A bad row has no order: report the lowest ids.
        token = tl.where(bad, rank, 0x7FFFFFFF - (best & 0xFFFFFFFF))
        tl.store(top_ids_ptr + row * num_top + rank, token)
        value = value_of((best >> 32).to(tl.int32))
        tl.store(top_logprobs_ptr + row * num_top + rank, value - base)

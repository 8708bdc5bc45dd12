"""K1: one read of the logits gives each block's maximum, its argmax and its sum of exponentials."""

from typing import NamedTuple

import torch

from outrider.kernels.philox import FIXED_ONE
from outrider.kernels.sampling import BLOCK, Sampling, block_width, num_blocks


class BlockStats(NamedTuple):
    max: torch.Tensor  # [N, num_blocks] float32; NaN or inf: the block holds a NaN or an inf
    argmax: torch.Tensor  # [N, num_blocks] int32 token id, the lowest of equals
    total: torch.Tensor  # [N, num_blocks] float32 sum of exp((l - max) / t); 0 on greedy rows


def blocks_reference(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Raw logits as float32 blocks, the last padded with -inf.

    Shape: [N, V] -> [N, num_blocks, block_width].
    """
    x = logits[:, :vocab_size].float()
    shape = (len(x), num_blocks(vocab_size), block_width(vocab_size))
    pad = shape[1] * shape[2] - x.shape[1]
    if pad:
        x = torch.nn.functional.pad(x, (0, pad), value=-torch.inf)
    return x.reshape(shape)


def scan_reference(logits: torch.Tensor, sampling: Sampling, vocab_size: int) -> BlockStats:
    """Stats of each row under its own parameters. Shape: logits [N, V], sampling [N]."""
    x = blocks_reference(logits, vocab_size)
    block_max, index = x.max(-1)
    total = torch.zeros_like(block_max)
    sampled = (sampling.temperature > 0).nonzero().squeeze(-1)
    if len(sampled):
        if len(sampled) < len(x):
            x, inv_t = x[sampled], sampling.inverse_temperature()[sampled]
        else:
            inv_t = sampling.inverse_temperature()
        # An empty block's own maximum, -inf, would make NaN of it.
        safe_max = block_max[sampled].clamp_min(torch.finfo(torch.float32).min)
        weight = torch.exp((x - safe_max[..., None]).mul_(inv_t[:, None, None]))
        total[sampled] = weight.mul_(FIXED_ONE).long().sum(-1).float() / FIXED_ONE
    first = torch.arange(0, index.shape[1] * BLOCK, BLOCK, device=index.device)
    return BlockStats(block_max, (index + first).int(), total)

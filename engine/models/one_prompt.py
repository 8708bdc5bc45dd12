"""A batch of one prompt, for trying out a model at load."""

import torch
from torch import Tensor

from outrider.kernels.model.rows import BatchRows

from .attention import ForwardBatch

PAGE = 16  # tokens; as by default, so that attention is compiled for one size


def num_pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def one_prompt(
    input_ids: Tensor,
    first: int = 0,
    *,
    follows: bool = False,
    max_len: int = 0,
    batch_invariant: bool = False,
) -> ForwardBatch:
    """The tokens of a prompt from position `first` on; every row gets logits.

    Its pages of PAGE tokens lie in order, and the block table has room for `max_len` tokens. If it
    `follows`, the pages also hold the tokens before `first`, and rows attend to them. Otherwise the
    pages hold these tokens alone. Shape: input_ids [T].
    """
    length, device = len(input_ids), input_ids.device
    num_before = first if follows else 0
    end = num_before + length
    rows = torch.arange(length, device=device)
    num_pages = num_pages_of(end)
    # As wide for every prompt: the order of sums in attention may depend on the width.
    table = torch.zeros(1, num_pages_of(max(end, max_len)), dtype=torch.int32, device=device)
    table[0, :num_pages] = torch.arange(num_pages, device=device)
    return ForwardBatch(
        input_ids,
        BatchRows(
            slot_of_row=torch.zeros_like(rows),
            positions=rows + first,
            places=rows + num_before,
            slots=torch.zeros_like(rows[:1]),
            seq_lens=torch.full_like(rows[:1], end),
            cu_seqlens_q=torch.tensor([0, length], device=device),
        ),
        logits_rows=rows,
        block_tables=table[None],
        page_size=PAGE,
        num_tokens=torch.full_like(rows[:1], end),
        batch_invariant=batch_invariant,
    )

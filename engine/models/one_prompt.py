"""A batch of one prompt, for trying out a model at load."""

import torch
from torch import Tensor

from ..state.batch import BatchRows, ForwardBatch
from .attention import PassContext


def one_prompt(
    input_ids: Tensor,
    first: int = 0,
    *,
    page_size: int = 0,
    max_len: int = 0,
    same_bits: bool = False,
) -> PassContext:
    """The tokens of a prompt from position `first` on; every row gets logits.

    With a `page_size`, they follow the tokens before them in pages that lie in order, and the block
    table has room for `max_len` tokens. Without one, a single page holds these tokens alone, and
    nothing before them is attended to. Shape: input_ids [T].
    """
    length, device = len(input_ids), input_ids.device
    num_before = first if page_size else 0
    end, page_size = num_before + length, page_size or length
    rows = torch.arange(length, device=device)
    num_pages = -(-end // page_size)
    # As wide for every prompt: the order of sums in attention may depend on the width.
    table = torch.zeros(1, -(-max(end, max_len) // page_size), dtype=torch.int32, device=device)
    table[0, :num_pages] = torch.arange(num_pages, device=device)
    return PassContext(
        ForwardBatch(
            input_ids,
            BatchRows(
                slot_of_row=torch.zeros_like(rows),
                positions=rows + first,
                slot_mapping=rows + num_before,
                slots=torch.zeros_like(rows[:1]),
                seq_lens=torch.full_like(rows[:1], end),
                cu_seqlens_q=torch.tensor([0, length], device=device),
            ),
            logits_rows=rows,
            block_table=table,
            page_size=page_size,
        ),
        same_bits=same_bits,
    )

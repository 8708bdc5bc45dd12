"""One ragged batch: token ranges of several sequences, flattened for one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.ragged import ragged_arange
from outrider.engine.slots import Slots


@dataclass(slots=True)
class ForwardBatch:
    """T rows of B sequences; sequence i contributes rows cu_seqlens_q[i]:cu_seqlens_q[i+1].

    The same shape serves prefill chunks, plain decodes, verifications and the draft's steps.
    """

    # [T]
    input_ids: Tensor
    # [T] position of each row in its sequence
    positions: Tensor
    # [T] where each row's KV goes: page * page_size + offset
    slot_mapping: Tensor
    # [B + 1]
    cu_seqlens_q: Tensor
    # [B] tokens a sequence attends to, its own rows included
    seq_lens: Tensor
    # [B] rows of the block table
    slots: Tensor
    # [num_slots, pages]
    block_table: Tensor
    # [num_logits] rows whose logits are wanted
    logits_rows: Tensor
    # [B] host twins, for shapes and for the CPU's attention
    query_lens_np: np.ndarray
    seq_lens_np: np.ndarray

    @staticmethod
    def build(
        slots: Slots,
        slot_np: np.ndarray,
        starts_np: np.ndarray,
        query_lens_np: np.ndarray,
        num_logits_np: np.ndarray,
    ) -> "ForwardBatch":
        """Rows `starts[i] : starts[i] + query_lens[i]` of each sequence, read from its slot.

        All arguments: [B]. Logits are wanted of the last `num_logits[i]` rows of sequence i.
        """
        seq_lens_np = starts_np + query_lens_np
        ends_np = np.cumsum(query_lens_np)
        cu_np = np.concatenate(([0], ends_np))
        row_of_np = np.repeat(np.arange(len(slot_np)), query_lens_np)
        positions_np = np.arange(cu_np[-1]) + np.repeat(starts_np - cu_np[:-1], query_lens_np)
        logits_rows_np = ragged_arange(ends_np - num_logits_np, num_logits_np)

        device = slots.device
        slot = torch.from_numpy(slot_np).to(device)
        row_of = torch.from_numpy(row_of_np).to(device)
        positions = torch.from_numpy(positions_np).to(device)
        slot_of_row = slot[row_of]
        page = slots.block_table[slot_of_row, positions // slots.page_size].long()
        return ForwardBatch(
            input_ids=slots.token_ids[slot_of_row, positions].long(),
            positions=positions,
            slot_mapping=page * slots.page_size + positions % slots.page_size,
            cu_seqlens_q=torch.from_numpy(cu_np).to(device, torch.int32),
            seq_lens=torch.from_numpy(seq_lens_np).to(device, torch.int32),
            slots=slot,
            block_table=slots.block_table,
            logits_rows=torch.from_numpy(logits_rows_np).to(device),
            query_lens_np=query_lens_np,
            seq_lens_np=seq_lens_np,
        )

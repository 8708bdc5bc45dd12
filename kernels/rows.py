"""What a batch's rows hold: the token of each, and where in the pages its KV goes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels._dispatch import uses_triton


def read_rows(
    slot_of_row: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Token ids of the rows, and page * page_size + offset of their positions.

    Shape:
        slot_of_row, positions: [T] int64
        token_ids: [num_slots, width] int32; block_table: [num_slots, pages] int32
        returns: [T] int64 each
    """
    if not uses_triton(token_ids):
        return read_rows_reference(slot_of_row, positions, token_ids, block_table, page_size)
    ids, slot_mapping = torch.empty_like(positions), torch.empty_like(positions)
    _read_rows_kernel[(triton.cdiv(len(positions), 256),)](
        ids,
        slot_mapping,
        slot_of_row,
        positions,
        token_ids,
        block_table,
        len(positions),
        page_size,
        token_ids.stride(0),
        block_table.stride(0),
        BLOCK=256,
    )
    return ids, slot_mapping


def read_rows_reference(
    slot_of_row: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    page = block_table[slot_of_row, positions // page_size].long()
    ids = token_ids[slot_of_row, positions].long()
    return ids, page * page_size + positions % page_size


@triton.jit(do_not_specialize=["num_rows"])
def _read_rows_kernel(
    ids_ptr,  # [num_rows]
    slot_mapping_ptr,  # [num_rows]
    slot_ptr,  # [num_rows]
    position_ptr,  # [num_rows]
    token_ids_ptr,  # [num_slots, width]
    block_table_ptr,  # [num_slots, pages]
    num_rows,
    page_size,
    token_ids_stride,
    block_table_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slot_ptr + row, mask=inside, other=0)
    position = tl.load(position_ptr + row, mask=inside, other=0)
    token = tl.load(token_ids_ptr + slot * token_ids_stride + position, mask=inside)
    page = tl.load(block_table_ptr + slot * block_table_stride + position // page_size, mask=inside)
    tl.store(ids_ptr + row, token.to(tl.int64), mask=inside)
    slot_mapping = page.to(tl.int64) * page_size + position % page_size
    tl.store(slot_mapping_ptr + row, slot_mapping, mask=inside)

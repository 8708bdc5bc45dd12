"""The rows of logits that an edit's kernel is applied to."""

from typing import NamedTuple

import torch


class EditRows(NamedTuple):
    """M rows of a logits tensor, no row twice.

    A row's prefix is `token_ids[slot, :position]`: the request's known tokens and the drafts before
    the row. That holds for rows of the draft and of the target alike.
    """

    row: torch.Tensor  # [M] int64, row of the logits
    slot: torch.Tensor  # [M] int64, slot of the request's state
    position: torch.Tensor  # [M] int64, position of the token that the row predicts


def check_rows(logits: torch.Tensor, rows: EditRows) -> None:
    """Refuse strided tensors: the kernels assume dense ones and would read the wrong elements."""
    assert logits.ndim == 2, f"logits: [N, V] expected, not {list(logits.shape)}"
    assert logits.stride(1) == 1, "logits: the vocabulary must be the dense dimension"
    assert all(x.dtype == torch.int64 and x.stride(0) == 1 for x in rows if len(x) > 1)

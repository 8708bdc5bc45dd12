"""Rows of logits that a request's own edits apply to: what every kernel of an edit is given."""

from typing import NamedTuple

import torch


class EditRows(NamedTuple):
    """M rows of a logits tensor, no row twice.

    A row's prefix is `token_ids[slot, :position]`: the request's known tokens and the drafts before
    the row. Draft and target rows are described alike, so both models see one processed view.
    """

    row: torch.Tensor  # [M] int64, row of the logits
    slot: torch.Tensor  # [M] int64, where the request's state lies
    position: torch.Tensor  # [M] int64, of the token that the row is for


def check_rows(logits: torch.Tensor, rows: EditRows) -> None:
    """The kernels index these as dense: a strided view would be read wrongly, not slowly."""
    assert logits.ndim == 2, f"logits: [N, V] expected, not {list(logits.shape)}"
    assert logits.stride(1) == 1, "logits: the vocabulary must be the dense dimension"
    assert all(x.dtype == torch.int64 and x.stride(0) == 1 for x in rows if len(x) > 1)

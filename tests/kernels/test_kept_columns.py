"""Distributions are kept of fewer drafts than there may be: those from there on are one-hot."""

import pytest
import torch
from verification import DRAWING_ROADS, Batch, equal, mixed_sampling

from outrider.kernels.verify.sampling import STATE_LOG_Z


@pytest.mark.parametrize("road", DRAWING_ROADS)
@pytest.mark.parametrize(("columns", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_drafts_without_a_kept_distribution_are_one_hot(
    road: str, columns: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(columns)
    num_drafts = [3, 0, 1, 6, 2, 4, 6]
    batch = Batch(generator, num_drafts, 97, dtype, mixed_sampling(7, columns), noise=0.1)
    batch.state[:, columns:, STATE_LOG_Z] = torch.nan
    truth = batch.verify("reference")
    # Behind what is kept lies what would be drawn for certain, were it read.
    beyond = torch.full_like(batch.draft_logits[:, :columns], torch.inf)
    memory = torch.cat((batch.draft_logits[:, :columns], beyond))
    batch.draft_logits = memory[: len(num_drafts)]
    assert equal(batch.verify(road), truth)
    assert int(truth.num_tokens.max()) > columns + 1

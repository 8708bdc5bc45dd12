"""The list of what attention has to do: every row once, over all of its tokens."""

import pytest
import torch
from verification import HAS_KERNELS

from outrider.kernels.model.attention_items import MAX_SPLITS, list_items

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")


@pytest.mark.parametrize(
    ("rows", "lens"),
    [
        ([1, 1, 1], [1, 256, 257]),
        ([5, 1, 5], [700, 4096, 70_000]),
        ([3, 0, 0], [9, 0, 0]),  # padded
        ([300, 1, 20], [300, 90, 1000]),  # with a prefill: nothing is split
    ],
)
def test_items_cover_every_row_and_token_once(
    rows: list[int], lens: list[int], device: torch.device
) -> None:
    cu = torch.tensor([0, *rows]).cumsum(0).to(device)
    slots = torch.tensor([7, 4, 5], device=device)
    listed = list_items(cu, torch.tensor(lens, device=device), slots, sum(rows), 2, group=4)
    items = listed.items[: int(listed.num_items)].tolist()
    covered: dict[int, list[tuple[int, int]]] = {row: [] for row in range(sum(rows))}
    for first_row, num_rows, first_position, slot, split, split_tokens, row_block, _ in items:
        assert 0 < num_rows <= listed.block_q
        assert row_block < listed.num_row_blocks
        request = slots.tolist().index(slot)
        first_q = first_row - int(cu[request])
        assert first_position == lens[request] - rows[request] + first_q
        for row in range(first_row, first_row + num_rows):
            covered[row].append(
                (split * split_tokens, min((split + 1) * split_tokens, lens[request]))
            )
    for request, length in enumerate(lens):
        for row in range(int(cu[request]), int(cu[request + 1])):
            ends = [0, *(end for _, end in covered[row])]
            assert [start for start, _ in covered[row]] == ends[:-1]
            assert ends[-1] == length
            assert len(covered[row]) <= (MAX_SPLITS if listed.splits else 1)
    blocks = [(item[6], item[4]) for item in items]
    assert len(set(blocks)) == len(blocks)  # a counter belongs to one block of rows

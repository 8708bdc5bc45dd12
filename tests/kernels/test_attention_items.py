"""The list of what attention has to do: every row once, over all of its tokens."""

from collections.abc import Iterator

import pytest
import torch
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model.attention_items import PROMPT_ROWS, list_items

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")


def split_starts(num_tokens: int, unit: int) -> Iterator[int]:
    """16 splits of a unit, then 8 to every doubling."""
    start = 0
    while start < num_tokens:
        yield start
        start += max(unit, (1 << max(start, 1).bit_length() - 1) // 8)


@pytest.mark.parametrize(
    ("rows", "lens"),
    [
        ([1, 1, 1], [1, 256, 257]),
        ([5, 1, 5], [700, 4096, 70_000]),
        ([3, 0, 0], [9, 0, 0]),  # padded
        ([300, 1, 20], [300, 90, 1000]),  # with a prefill: nothing is split
    ],
)
@pytest.mark.parametrize("holds_prompt", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_items_cover_every_row_and_token_once(
    rows: list[int], lens: list[int], batch_invariant: bool, holds_prompt: bool
) -> None:
    cu = torch.tensor([0, *rows]).cumsum(0).to(DEVICE)
    slots = torch.tensor([7, 4, 5], device=DEVICE)
    lengths = torch.tensor(lens, device=DEVICE)
    listed = list_items(
        cu, lengths, slots, sum(rows), 2, 4, 70_000, batch_invariant=batch_invariant,
        holds_prompt=holds_prompt,
    )  # fmt: skip
    if holds_prompt:  # as a prompt, however few rows there are: no parts of rows are kept
        assert (listed.block_m, listed.num_splits) == (PROMPT_ROWS, 1)
    items = listed.items[: int(listed.num_items)].tolist()
    covered: dict[int, list[tuple[int, int]]] = {row: [] for row in range(sum(rows))}
    starts = list(split_starts(70_000, 256))
    for first_row, num_rows, first_position, slot, split, unit, row_block, *_ in items:
        borders = [start // 256 * unit for start in (*starts, 1 << 30)]
        if listed.is_prefill:  # an item is of all tokens, whatever splits it adds up
            borders = [0, 1 << 30]
        assert 0 < num_rows <= listed.block_q
        assert row_block < listed.num_row_blocks
        request = slots.tolist().index(slot)
        first_q = first_row - int(cu[request])
        assert first_position == lens[request] - rows[request] + first_q
        for row in range(first_row, first_row + num_rows):
            covered[row].append((borders[split], min(borders[split + 1], lens[request])))
    for request, length in enumerate(lens):
        for row in range(int(cu[request]), int(cu[request + 1])):
            ends = [0, *(end for _, end in covered[row])]
            assert [start for start, _ in covered[row]] == ends[:-1]
            assert ends[-1] == length
            assert len(covered[row]) <= listed.num_splits
    for slot in slots.tolist():  # the longest first
        positions = [item[2] for item in items if item[3] == slot]
        assert positions == sorted(positions, reverse=True)
    blocks = [(item[6], item[4]) for item in items]
    assert len(set(blocks)) == len(blocks)  # a counter belongs to one block of rows

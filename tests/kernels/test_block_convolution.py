"""The convolution over the rows of blocks, against plain torch."""

import pytest
import torch
from random_tensors import normals
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model.block_convolution import block_convolution, block_convolution_reference
from outrider.kernels.model.rows import BatchRows

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")


def blocks(*sizes: int, known: int) -> tuple[BatchRows, torch.Tensor]:
    """Blocks of so many rows, each behind one known token more than the last; then two of padding.

    The slot of padding has no tokens.
    """
    num_tokens = torch.tensor([known + i for i in range(len(sizes))] + [0], device=DEVICE)
    slot = [i for i, size in enumerate(sizes) for _ in range(size)] + [len(sizes)] * 2
    at = [known + i - 1 + j for i, size in enumerate(sizes) for j in range(size)] + [0, 0]
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    slots, positions = (torch.tensor(each, device=DEVICE) for each in (slot, at))
    return BatchRows(slots, positions, none, none, none, none), num_tokens


@pytest.mark.parametrize(
    ("sizes", "width", "taps", "groups"),
    [((4, 1, 6), 96, 2, 6), ((), 40, 3, 5), ((3, 2), 1100, 3, 11), ((8,), 16, 1, 1)],
)
@pytest.mark.parametrize("adds", [False, True])
def test_kernel_equals_reference(
    sizes: tuple[int, ...], width: int, taps: int, groups: int, adds: bool
) -> None:
    randn = normals(width)
    rows, num_tokens = blocks(*sizes, known=5)
    num_rows = len(rows.positions)
    x, residual = randn(num_rows, width), randn(num_rows, width)
    delta = randn(num_rows, 2, taps, groups)[:, 1]
    arguments = x, randn(taps, width), delta, rows, num_tokens
    expected = block_convolution_reference(*arguments)
    if adds:
        expected += residual
    got = block_convolution(*arguments, residual=residual if adds else None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert (got is residual) == adds


def test_no_row_reads_a_row_in_front_of_its_block() -> None:
    rows, num_tokens = blocks(3, 4, known=9)
    x = torch.arange(1.0, 10.0, device=DEVICE)[:, None].repeat(1, 4)
    base = torch.tensor([0.0, 1.0], device=DEVICE)[:, None].repeat(1, 4)  # the row before
    delta = torch.zeros(9, 2, 2, device=DEVICE)
    got = block_convolution(x, base, delta, rows, num_tokens)
    assert got[:7, 0].tolist() == [0, 1, 2, 0, 4, 5, 6]

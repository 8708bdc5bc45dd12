"""How many kernels the parts of a step launch, each of which waits for the one before."""

import pytest
import torch
from torch import Tensor

from outrider.engine.models.attention import ForwardBatch
from outrider.engine.models.narrow_weight import Scaled, Stacked
from outrider.engine.models.parts.delta_net import DeltaNet
from outrider.engine.models.parts.head_states import HeadStates
from outrider.engine.models.weights import Dense, Linear, Matrix
from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model.narrow_matrix import narrow_matrix
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.rows import BatchRows
from outrider.kernels.model.state_layer import StateHeads, StateMemory, StateWeights, rows_kept

machine_code = pytest.importorskip("machine_code", exc_type=ImportError)
pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="there the kernels run"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would forget what graphs use"),
]
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
ROWS, HIDDEN = 4, 512
HEADS = StateHeads(2, 4, 128, 128, num_scalars=2)
NUM_VALUES = HEADS.num_value_heads * HEADS.value_dim


def empty(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def dense(num_out: int, num_in: int) -> Dense:
    return Dense(empty(num_out, num_in))


def fp8(num_out: int, num_in: int) -> Scaled:
    """In blocks of 128 x 128."""
    codes = empty(num_out, num_in, dtype=torch.float8_e4m3fn)
    scale = empty(num_in // 128, num_out // 128, dtype=FLOAT32)
    matrix = narrow_matrix("fp8", codes, scale, group=128, rows=128, rounds_inputs=True)
    return Scaled(matrix, BFLOAT16)


def norm_of(width: int, dtype: torch.dtype = BFLOAT16) -> Norm:
    return Norm(empty(width, dtype=dtype), 1e-6)


def delta_net(inputs: Matrix, output: Matrix) -> DeltaNet:
    numbers = empty(HEADS.num_value_heads, dtype=FLOAT32)
    memory = StateMemory(
        empty(1, HEADS.num_value_heads, HEADS.key_dim, HEADS.value_dim, dtype=FLOAT32),
        empty(1, rows_kept(4, ROWS), HEADS.row_width),
        empty(1, dtype=torch.int64),
    )
    return DeltaNet(
        norm=norm_of(HIDDEN),
        inputs=Linear(inputs, None),
        output=Linear(output, None),
        weights=StateWeights(empty(4, HEADS.num_channels).t(), numbers, numbers),
        gated_norm=norm_of(HEADS.value_dim, FLOAT32),
        state=HeadStates(HEADS, 4, memory),
    )


def batch() -> ForwardBatch:
    """A sequence's last token and its drafts."""
    of_rows, of_one, bounds = (empty(size, dtype=torch.int64) for size in (ROWS, 1, 2))
    rows = BatchRows(of_rows, of_rows, of_rows, of_one, of_one, bounds)
    return ForwardBatch(of_rows, rows, of_rows, empty(1, 1, 8, dtype=torch.int32), 16, of_one)


def test_a_delta_net_multiplies_once_for_each_format_of_its_inputs() -> None:
    """And neither copies nor joins what it gets."""
    state = ["prepare_kernel", "cells_kernel", "cell_by_cell_kernel", "remember_kernel"]
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        plain = delta_net(dense(HEADS.row_width + NUM_VALUES, HIDDEN), dense(HIDDEN, NUM_VALUES))
        x, given = empty(ROWS, HIDDEN), batch()
        normed = rms_norm(x, plain.norm)
        mixed = Stacked([fp8(HEADS.num_channels + NUM_VALUES, HIDDEN), dense(8, HIDDEN)])
        blocks = delta_net(mixed, fp8(HIDDEN, NUM_VALUES))
        names.clear()
        plain(x, normed, norm_of(HIDDEN), given)
        assert names == [
            "_product_kernel",
            *state,
            "_gated_norm_kernel",
            "_product_kernel",
            "_add_parts_kernel",
        ]
        names.clear()
        blocks(x, normed, norm_of(HIDDEN), given)
        assert names == [
            "_round_rows_kernel",
            "_scaled_kernel",
            "_product_kernel",
            *state,
            "_gated_norm_kernel",
            "_round_rows_kernel",
            "_scaled_kernel",
            "_add_parts_kernel",
        ]

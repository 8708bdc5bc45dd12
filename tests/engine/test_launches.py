"""How many kernels the parts of a step launch, each of which waits for the one before."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Unpack

import pytest
import torch
from torch import Tensor

from outrider.engine.models import narrow_weight
from outrider.engine.models.attention import ForwardBatch, PagedAttention, Rope
from outrider.engine.models.blocks import Block, Stack
from outrider.engine.models.expert_weights import StackedExperts
from outrider.engine.models.narrow_weight import Scaled, Stacked
from outrider.engine.models.parts.attention import Attention
from outrider.engine.models.parts.delta_net import DeltaNet
from outrider.engine.models.parts.experts import ExpertMLP
from outrider.engine.models.parts.gated_mlp import GatedMLP
from outrider.engine.models.parts.head_states import HeadStates
from outrider.engine.models.weights import Dense, Fused, Layer, Linear, Matrix
from outrider.engine.ranks.shared_decoder import SummedOverRanks
from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model.expert_matrix import SILU
from outrider.kernels.model.gated_norm import gated_norm
from outrider.kernels.model.linear import add_linear, linear
from outrider.kernels.model.narrow_matrix import NarrowMatrix, RowFormat, narrow_matrix
from outrider.kernels.model.rms_norm import Norm, rms_norm_reference
from outrider.kernels.model.routing import Router, route
from outrider.kernels.model.row_codes import RowCodes, Rows, plain, round_rows_reference
from outrider.kernels.model.rows import BatchRows
from outrider.kernels.model.split_product import add_parts
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


def fp8_blocks(num_out: int, num_in: int) -> NarrowMatrix:
    """Of 128 x 128."""
    codes = empty(num_out, num_in, dtype=torch.float8_e4m3fn)
    scale = empty(num_in // 128, num_out // 128, dtype=FLOAT32)
    return narrow_matrix("fp8", codes, scale, group=128, rows=128, rounds_inputs=True)


def fp8(num_out: int, num_in: int) -> Scaled:
    return Scaled(fp8_blocks(num_out, num_in), BFLOAT16)


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


STATE = ["prepare_kernel", "cells_kernel", "cell_by_cell_kernel"]


def test_a_delta_net_multiplies_once_for_each_format_of_its_inputs() -> None:
    """And nothing copies, joins or rounds what one kernel gives to the next."""
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        plain = delta_net(dense(HEADS.row_width + NUM_VALUES, HIDDEN), dense(HIDDEN, NUM_VALUES))
        mixed = Stacked([fp8(HEADS.num_channels + NUM_VALUES, HIDDEN), dense(8, HIDDEN)])
        blocks = delta_net(mixed, fp8(HIDDEN, NUM_VALUES))
        for net, product in ((plain, "_product_kernel"), (blocks, "_scaled_kernel")):
            normed = add_parts(empty(ROWS, HIDDEN), empty(2, ROWS, HIDDEN), net.norm)
            names.clear()
            net(empty(ROWS, HIDDEN), normed, norm_of(HIDDEN), batch())
            of_scalars = ["_product_kernel"] if net is blocks else []
            last = ["_gated_norm_kernel", product, "_add_parts_kernel"]
            assert names == [product, *of_scalars, *STATE, *last]
        names.clear()
        blocks(empty(ROWS, HIDDEN), None, None, batch())
        assert names[:3] == ["_round_rows_kernel", "_scaled_kernel", "_product_kernel"]


def test_gated_attention_rounds_what_it_gives_to_its_output_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = 4, 256
    monkeypatch.setattr(PagedAttention, "store", lambda *_, **__: empty(ROWS, *heads))
    monkeypatch.setattr(PagedAttention, "__call__", lambda *_: empty(ROWS, *heads))
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        part = Attention(
            norm=norm_of(HIDDEN),
            qkv=Linear(fp8(2048 + 2 * 256, HIDDEN), None),
            output=Linear(fp8(HIDDEN, 1024), None),
            attention=PagedAttention(heads[0], 1, heads[1], heads[1], 1 / 16),
            rope=Rope(empty(32, dtype=FLOAT32), 1.0),
            gated=True,
        )
        normed = add_parts(empty(ROWS, HIDDEN), empty(2, ROWS, HIDDEN), part.norm)
        names.clear()
        part(empty(ROWS, HIDDEN), normed, norm_of(HIDDEN), batch())
        assert names[-4:] == [
            "_scaled_kernel", "_gate_heads_kernel", "_scaled_kernel", "_add_parts_kernel"
        ]  # fmt: skip


def test_ranks_are_given_codes_of_their_own_inputs() -> None:
    group: Any = SimpleNamespace(parts=lambda like, compute: compute(None).unsqueeze(0))
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        output = Linear(SummedOverRanks(fp8(HIDDEN, NUM_VALUES), group), None)
        norm = output.weight.before(norm_of(128, FLOAT32))
        x = empty(ROWS, HEADS.num_value_heads, 128)
        y = gated_norm(x, norm, empty(ROWS, NUM_VALUES))
        output.add_to(empty(ROWS, HIDDEN), y)
        assert names == ["_gated_norm_kernel", "_scaled_kernel", "_add_parts_kernel"]
        assert output(y).shape == (ROWS, HIDDEN)


def test_blocks_and_the_norm_behind_them_take_codes_of_layers_that_are_rounded_later() -> None:
    """As those of a head are once they have been read."""
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        blocks = [Block(mlp(dense(1024, HIDDEN), dense(HIDDEN, 512))) for _ in range(2)]
        stack = Stack(empty(9, HIDDEN), blocks, norm_of(HIDDEN), Linear(dense(128, HIDDEN), None))
        stack.change_linears(lambda layer: layer._replace(weight=fp8(*layer.weight.shape)))
        names.clear()
        y = stack.through_blocks(empty(ROWS, HIDDEN), None, batch(), stack.norm)
        inside = ["_scaled_kernel", "_round_rows_kernel", "_scaled_kernel", "_add_parts_kernel"]
        assert names == ["_round_rows_kernel", *inside, *inside]
        assert isinstance(y, Tensor)
        assert stack.through_blocks(empty(ROWS, HIDDEN), None, batch()) is None


def mlp(gate_up: Matrix, down: Matrix) -> GatedMLP:
    return GatedMLP(norm=norm_of(HIDDEN), gate_up=Linear(gate_up, None), down=Linear(down, None))


class Noted(Dense):
    """Notes what it multiplies."""

    def __init__(self, row_format: RowFormat | None) -> None:
        super().__init__(torch.empty(16, 256))
        self.row_format, self.given = row_format, list[Rows]()

    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        self.given.append(x)
        return torch.zeros(len(plain(x)), 16)


def test_each_matrix_of_several_gets_rows_as_it_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row_format = RowFormat(torch.int8, 128, 2, 256)
    codes, rows = Noted(row_format), Noted(None)
    both = Stacked([codes, rows])
    assert both.row_format == row_format._replace(keeps_rows=True)
    assert Stacked([codes, codes]).row_format == row_format
    assert Stacked([rows, rows]).row_format is None
    assert Stacked([codes, Noted(RowFormat(torch.int8, 256, 1, 256))]).row_format is None
    x, norm = torch.randn(3, 256), both.before(Norm(torch.randn(256), 1e-6))
    given = round_rows_reference(x, both.row_format, norm)
    both.multiply(given, None)
    monkeypatch.setattr(narrow_weight, "uses_triton", lambda _: True)
    both.pieces(x, None, norm, [20, 12])
    for one in codes.given:
        assert isinstance(one, RowCodes)
        assert torch.equal(one.codes, given.codes)
    for one in rows.given:
        assert isinstance(one, Tensor)
        assert torch.equal(one, rms_norm_reference(x, norm))
    assert len(codes.given) == len(rows.given) == 2
    only_codes = round_rows_reference(x, row_format)
    with pytest.raises(TypeError, match="as codes alone"):
        Dense(torch.empty(16, 256)).multiply(only_codes, None)


def mixture(
    num_stacked: int,
    shared: GatedMLP | None,
    matrix_of: Callable[[int, int], Tensor | NarrowMatrix] = empty,
    norm: Norm | None = None,
) -> ExpertMLP:
    """Of 32 experts, of which a row takes 4, and a gated one that it takes as well."""
    inner, num_taken = 128, 4 + num_stacked

    def experts(num_out: int, num_in: int) -> Layer[StackedExperts]:
        num_all = 32 + num_stacked
        matrix = matrix_of(num_all * num_out, num_in)
        return Layer(StackedExperts(matrix, num_all, num_taken, BFLOAT16), None)

    return ExpertMLP(
        norm=norm,
        router_layer=Linear(dense(48, HIDDEN), None),
        first=experts(2 * inner, HIDDEN),
        down=experts(HIDDEN, inner),
        activation=SILU,
        router=Router(4, num_shared=num_stacked, gate=32),
        shared=shared,
    )


def test_an_expert_that_all_rows_share_takes_no_launch_if_it_is_stacked() -> None:
    alike = ["_product_kernel", "_route_kernel", "_experts_kernel"]
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        mlp = GatedMLP(None, Linear(dense(2 * 96, HIDDEN), None), Linear(dense(HIDDEN, 96), None))
        x, given = empty(ROWS, HIDDEN), batch()
        stacked, by_itself = mixture(1, None), mixture(0, mlp)
        names.clear()
        stacked(x, x, norm_of(HIDDEN), given)
        assert names == [*alike, "_experts_kernel", "_add_parts_kernel"]
        names.clear()
        by_itself(x, x, norm_of(HIDDEN), given)
        added = ["_product_kernel", "_gate_heads_kernel", "_product_kernel", "_add_parts_kernel"]
        assert names == [*alike, *added, "_experts_kernel", "_add_parts_kernel"]


def test_few_rows_are_listed_by_the_kernel_that_routes_them() -> None:
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        for num_rows, listing in ((1, []), (8, []), (9, ["_list_kernel"])):
            names.clear()
            route(empty(num_rows, 32), Router(4))
            assert names == ["_route_kernel", *listing]


def test_a_bias_takes_no_launch() -> None:
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        weight, bias, norm = empty(HIDDEN, HIDDEN), empty(HIDDEN), norm_of(HIDDEN)
        for num_rows, product in ((1, "_fused_kernel"), (ROWS, "_product_kernel")):
            names.clear()
            linear(empty(num_rows, HIDDEN), weight, bias)
            assert names == [product]
        for num_rows, product in ((ROWS, "_product_kernel"), (64, "bmm")):
            names.clear()
            x, residual = empty(num_rows, HIDDEN), empty(num_rows, HIDDEN)
            assert add_linear(residual, x, weight, bias, norm=norm) is not None
            assert names == [product, "_add_parts_kernel"]


def test_inputs_of_experts_are_rounded_where_they_are_made_or_read() -> None:
    """Those of first by the norm in front, which keeps the rows for the router."""
    with machine_code.names_of_launches(machine_code.RTX_4090) as names:
        part = mixture(1, None, fp8_blocks, norm_of(HIDDEN))
        for num_rows in (ROWS, 1024):
            x = empty(num_rows, HIDDEN)
            normed = add_parts(x, empty(2, num_rows, HIDDEN), part.norm)
            assert isinstance(normed, RowCodes)
            assert normed.plain is not None
            names.clear()
            part(x, normed, norm_of(HIDDEN), batch())
            behind = names.index("_experts_kernel")
            assert "_round_rows_kernel" not in names[:behind]
            experts = ["_experts_kernel", "_round_rows_kernel", "_experts_kernel"]
            assert names[behind:] == [*experts, "_add_parts_kernel"]
        names.clear()
        part(x, None, norm_of(HIDDEN), batch())
        assert names[0] == "_round_rows_kernel"

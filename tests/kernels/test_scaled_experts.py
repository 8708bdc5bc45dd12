"""Experts in blocks of FP8 whose inputs are rounded too, against the formulas over their codes."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from random_tensors import normals
from torch import Tensor
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model import expert_tiles
from outrider.kernels.model import experts as experts_module
from outrider.kernels.model.expert_matrix import (
    RELU_SQUARED,
    SILU,
    Activation,
    ExpertMatrix,
    expert_of,
    for_expert,
    layers_in_first,
    row_format_of,
)
from outrider.kernels.model.experts import (
    activations_by_expert,
    add_by_expert,
    add_experts,
    expert_activations,
    product_reference,
)
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.narrow_matrix import NarrowMatrix, RowFormat, narrow_matrix
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.routing import Router, Routing, route
from outrider.kernels.model.row_codes import RowCodes, normed_rows, plain, round_rows, rounded_rows

randn = normals(0)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
# Tensor cores add products of 8 bits with some 14.
SUMS_ERROR = 1e-5 if DEVICE.type == "cpu" else 6e-3


class Experts(NamedTuple):
    first: ExpertMatrix
    down: ExpertMatrix
    activation: Activation


def matrix_of(num_experts: int, num_out: int, num_in: int, rows: int = 64) -> ExpertMatrix:
    """`rows`: how many outputs share a scale."""
    codes = (randn(num_experts * num_out, num_in) * 50).to(torch.float8_e4m3fn)
    shape = -(-num_in // 128), -(-num_experts * num_out // rows)
    scale = (randn(*shape).abs() + 0.1) / 500
    matrix = narrow_matrix("fp8", codes, scale, group=128, rows=rows, rounds_inputs=True)
    return ExpertMatrix(matrix, None, num_experts)


def make(
    num_experts: int = 3, width: int = 320, inner: int = 192, activation: Activation = SILU
) -> Experts:
    """A row's last group is half as long as the others."""
    first = matrix_of(num_experts, layers_in_first(activation) * inner, width)
    return Experts(first, matrix_of(num_experts, width, inner), activation)


def format_of(layer: ExpertMatrix) -> RowFormat:
    row_format = row_format_of(layer)
    assert row_format is not None
    return row_format


def add(residual: Tensor, x: Tensor, routing: Routing, experts: Experts) -> None:
    wanted = row_format_of(experts.down)
    inner = expert_activations(x, routing, experts.first, experts.activation, wanted)
    add_experts(residual, inner, routing, experts.down)


def add_reference(residual: Tensor, x: Tensor, routing: Routing, experts: Experts) -> None:
    first, down = (partial(product_reference, layer) for layer in experts[:2])
    num_inner = experts.first.num_out // layers_in_first(experts.activation)
    inner = activations_by_expert(x, routing, first, num_inner, experts.activation)
    add_by_expert(residual, inner, routing, down)


def by_formulas(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)

    def product(layer: ExpertMatrix, expert: int, inputs: Tensor) -> Tensor:
        matrix, _ = expert_of(layer, expert, torch.float64)
        return rounded_rows(inputs.float(), format_of(layer)).double() @ matrix.T

    for expert in range(experts.first.num_experts):
        y = product(experts.first, expert, x)
        if experts.activation == RELU_SQUARED:
            inner = y.clamp(min=0) ** 2
        else:
            gate, up = y.chunk(2, 1)
            inner = F.silu(gate) * up
        weight = routing.weights.double().where(routing.ids == expert, 0).sum(1, keepdim=True)
        out += weight * product(experts.down, expert, inner)
    return out


@needs_kernels
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("activation", [SILU, RELU_SQUARED])
def test_products_are_those_of_rounded_rows(
    size: int, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "_TILES", (size,))
    experts, x = make(activation=activation), randn(70, 323)[:, :320]
    logits = randn(70, 3)
    logits[:, 2] -= 1.5
    routing = route(logits, Router(2))
    if size == 128:  # of the tiles some are at most half full
        pairs = routing.tiles.pairs[routing.tiles.experts < 3]
        assert (pairs[:, 64] == 140).any()
    residual, reference = torch.zeros_like(x), torch.zeros_like(x)
    add(residual, x, routing, experts)
    add_reference(reference, x, routing, experts)
    expected = by_formulas(x, routing, experts)
    scale = expected.norm()
    # The least difference may turn a code to the next one.
    assert (residual.double() - expected).norm() < (5e-3 + SUMS_ERROR) * scale
    without = Experts(
        *(layer._replace(matrix=unrounded(layer)) for layer in experts[:2]), activation
    )
    by_weights = torch.zeros_like(x)
    add_reference(by_weights, x, routing, without)
    assert (by_weights.double() - expected).norm() > 1.2e-2 * scale


def unrounded(layer: ExpertMatrix) -> NarrowMatrix:
    assert isinstance(layer.matrix, NarrowMatrix)
    return for_expert(layer.matrix._replace(rows=1, scale=of_rows(layer.matrix)))


def of_rows(matrix: NarrowMatrix) -> Tensor:
    return matrix.scale.repeat_interleave(matrix.rows, 1)[:, : len(matrix.codes)]


@needs_kernels
@pytest.mark.parametrize("num_in", [600, 1100, 1280])
def test_scales_are_those_of_their_groups(num_in: int) -> None:
    """Loaded at once, or while the group before is multiplied."""
    layer, routing = matrix_of(3, 192, num_in), route(randn(9, 3), Router(2))
    pairs = randn(18, num_in)
    pairs *= 2.0 ** torch.randint(-9, 9, pairs.shape, device=pairs.device)
    rows = round_rows(pairs, format_of(layer))
    got = experts_product(rows, routing, layer, None)
    for pair in range(18):
        row, choice = divmod(pair, 2)
        expected = product_reference(layer, int(routing.ids[row, choice]), pairs[pair : pair + 1])
        expected = expected[0] * routing.weights[row, choice]
        assert (got[choice, row] - expected).norm() < SUMS_ERROR * expected.norm()


@needs_kernels
def test_codes_behind_a_norm_are_those_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x, norm = make(), randn(20, 320), Norm(randn(320), 1e-5)
    routing = route(randn(20, 3), Router(2))
    rounds = format_of(experts.first)._replace(keeps_rows=True)
    rows = normed_rows(x, norm._replace(rounds=rounds))
    assert isinstance(rows, RowCodes)
    # A norm that rounds may sum a row in another order.
    torch.testing.assert_close(plain(rows), rms_norm(x, norm))
    assert isinstance(normed_rows(x, norm), Tensor)
    given = (rows, plain(rows), round_rows(plain(rows), format_of(experts.first)))
    found = [expert_activations(each, routing, experts.first, SILU) for each in given]
    assert all(torch.equal(plain(each), plain(found[0])) for each in found)
    # A prompt adds some outputs after others.
    whole, parts = randn(20, 320), None
    parts = whole.clone()
    add_experts(whole, found[0], routing, experts.down, norm)
    monkeypatch.setattr(experts_module, "_MOST_PARTS_BYTES", 0)
    monkeypatch.setattr(experts_module, "_OUTPUTS_AT_ONCE", 128)
    assert add_experts(parts, found[0], routing, experts.down, norm) is None
    assert torch.equal(parts, whole)


@needs_kernels
def test_scales_may_lie_one_after_the_other_along_the_inputs() -> None:
    layer, routing = matrix_of(3, 192, 320), route(randn(9, 3), Router(2))
    assert isinstance(layer.matrix, NarrowMatrix)
    turned = layer.matrix._replace(scale=layer.matrix.scale.t().contiguous().t())
    x = randn(9, 320)
    expected = expert_activations(x, routing, layer, RELU_SQUARED)
    got = expert_activations(x, routing, layer._replace(matrix=turned), RELU_SQUARED)
    assert torch.equal(plain(got), plain(expected))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter's products are numpy's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_comes_out_the_same_in_any_company_and_tile(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, x, logits = make(8, 512, 256), randn(900, 512).to(dtype), randn(900, 8)

    def outputs(some: slice) -> Tensor:
        out = torch.zeros_like(x[some])
        add(out, x[some], route(logits[some], Router(4)), experts)
        return out

    whole = outputs(slice(None))
    for first, last in ((0, 1), (7, 40), (70, 200), *((600 - n, 600) for n in range(1, 301, 7))):
        assert torch.equal(outputs(slice(first, last)), whole[first:last])
    for size in (16, 32, 64, 128):
        monkeypatch.setattr(expert_tiles, "_TILES", (size,))
        assert torch.equal(outputs(slice(0, 300)), whole[:300])


def test_inputs_of_experts_are_rounded_in_blocks_of_fp8_alone() -> None:
    """For one scale an output, or for all, a group is all inputs."""
    codes = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    for group, rows, rounds in ((128, 128, True), (256, 1, False), (256, 256, False)):
        scale = torch.ones(256 // group, 256 // rows)
        matrix = narrow_matrix("fp8", codes, scale, group=group, rows=rows, rounds_inputs=True)
        assert for_expert(matrix).rounds_inputs == rounds
    weights = narrow_matrix("fp8", codes, torch.ones(2, 2), group=128, rows=128)
    assert not for_expert(weights).rounds_inputs

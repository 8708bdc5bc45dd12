"""Experts of many rows in FP8 on Hopper GPUs, where blocks of weights share a scale.

On a CPU their kernel runs in plain torch.
"""

from functools import partial

import block_scaled
import pytest
import torch
from block_scaled import interpreted, make_matrix, make_rows
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model import block_scaled_experts as module
from outrider.kernels.model import block_scaled_product, experts
from outrider.kernels.model.block_scaled_experts import TiledRows, tiled_activations, tiled_parts
from outrider.kernels.model.expert_matrix import (
    RELU_SQUARED,
    SILU,
    ExpertMatrix,
    Glu,
    expert_of,
    part_of,
    row_format_of,
)
from outrider.kernels.model.expert_tiles import ExpertTiles
from outrider.kernels.model.narrow_matrix import NarrowMatrix, RowFormat
from outrider.kernels.model.routing import Routing
from outrider.kernels.model.row_codes import RowCodes, round_rows_reference
from outrider.kernels.model.split_product import add_parts_reference
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS

EXPERTS, SHARED, TOP_K, HIDDEN, INNER = 3, 1, 2, 512, 256


def run(x: RowCodes, routing: Routing) -> tuple[Tensor, Tensor]:
    """The activations of each pair, and the parts. Shape: [T * k, N], [k, T, N]"""
    first, down = make_layers()
    inner = tiled_activations(x, routing, first, SILU)
    return numbers(inner)[place_of_pair(routing)], tiled_parts(inner, routing, down)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, "_experts_kernel", Kernel(3, name="_experts_kernel"))


def make_routing(num_rows: int) -> Routing:
    """Of experts, of which a row takes two, and a shared one."""
    randn = normals(num_rows)
    ids = randn(num_rows, EXPERTS).topk(TOP_K).indices.int()
    shared = ids.new_full((num_rows, SHARED), EXPERTS)
    ids = torch.cat((ids, shared), 1)
    return Routing(ids, randn(num_rows, TOP_K + SHARED).abs(), tiles_of_128(ids))


def tiles_of_128(ids: Tensor) -> ExpertTiles:
    """As of many rows, and one that is empty."""
    experts, pairs = [], []
    for expert in range(EXPERTS + SHARED):
        for part in (ids.flatten() == expert).nonzero()[:, 0].split(128):
            experts.append(expert)
            pairs.append(torch.nn.functional.pad(part, (0, 128 - len(part)), value=ids.numel()))
    experts.append(EXPERTS + SHARED)
    pairs.append(torch.full((128,), ids.numel(), device=ids.device))
    made = torch.tensor(experts, device=ids.device).int(), torch.stack(pairs).int()
    return ExpertTiles(*made)


def make_layers() -> tuple[ExpertMatrix, ExpertMatrix]:
    num_all = EXPERTS + SHARED
    first, down = make_matrix(num_all * 2 * INNER, HIDDEN), make_matrix(num_all * HIDDEN, INNER)
    return ExpertMatrix(first, None, num_all), ExpertMatrix(down, None, num_all)


def by_expert(x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
    """Of each pair. Shape: [T * k, K] -> [T * k, N]"""
    y = x.new_empty(len(x), layer.num_out)
    for expert in range(layer.num_experts):
        which = (routing.ids == expert).flatten()
        y[which] = x[which] @ expert_of(layer, expert, torch.float64)[0].t()
    return y


def numbers(x: RowCodes | TiledRows) -> Tensor:
    return x.codes.double() * x.scale.repeat_interleave(128, 1)


def place_of_pair(routing: Routing) -> Tensor:
    pairs = routing.tiles.pairs.flatten()
    place = torch.empty(routing.ids.numel(), dtype=torch.int64, device=pairs.device)
    is_pair = pairs < routing.ids.numel()
    place[pairs[is_pair].long()] = is_pair.nonzero()[:, 0]
    return place


@pytest.mark.parametrize("glu", [SILU, Glu(1.702, 7.0, 1.0)], ids=["silu", "limited"])
def test_activations_are_those_of_the_numbers_that_codes_stand_for(glu: Glu, kernel: None) -> None:
    x, routing, (first, _) = (
        make_rows(200, HIDDEN, torch.bfloat16),
        make_routing(200),
        make_layers(),
    )
    gate, up = by_expert(numbers(x).repeat_interleave(3, 0), routing, first).chunk(2, 1)
    gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    exact = (up + glu.shift) * gate * torch.sigmoid(glu.alpha * gate)
    inner = tiled_activations(x, routing, first, glu)
    found = numbers(inner)[place_of_pair(routing)]
    expected = round_rows_reference(exact.bfloat16(), RowFormat(inner.codes.dtype, 128, 2, INNER))
    assert (found - numbers(expected)).norm() < 2e-2 * exact.norm()
    assert (found - exact).norm() < 4e-2 * exact.norm()


def test_parts_are_the_weighted_outputs_of_each_pair(kernel: None) -> None:
    num_rows = 150
    routing, (_, down) = make_routing(num_rows), make_layers()
    inner = TiledRows(*make_rows(routing.tiles.pairs.numel(), INNER, torch.bfloat16)[:3])
    exact = by_expert(numbers(inner)[place_of_pair(routing)], routing, down)
    exact = (exact * routing.weights.flatten()[:, None]).view(num_rows, -1, HIDDEN).transpose(0, 1)
    whole = tiled_parts(inner, routing, down)
    assert (whole - exact).norm() < 5e-3 * exact.norm()
    assert torch.equal(tiled_parts(inner, routing, down, range(128, 384)), whole[..., 128:384])


@interpreted
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_warps_and_copies_gives_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, routing = make_rows(140, HIDDEN, torch.bfloat16), make_routing(140)
    found = []
    for num_programs, each in ((1, 100), (2, seed)):
        kernel = Kernel(num_programs, each, "_experts_kernel")
        monkeypatch.setattr(module, "_experts_kernel", kernel)
        found.append(run(x, routing))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_bits_of_a_row_do_not_depend_on_its_company(kernel: None) -> None:
    num_rows, some = 270, slice(40, 111)
    x, routing = make_rows(num_rows, HIDDEN, torch.bfloat16), make_routing(num_rows)
    inner, parts = run(x, routing)
    ids = routing.ids[some].contiguous()
    fewer = Routing(ids, routing.weights[some].contiguous(), tiles_of_128(ids))
    inner_of_fewer, parts_of_fewer = run(RowCodes(x.codes[some], x.scale[some], x.dtype), fewer)
    assert torch.equal(inner_of_fewer, inner.view(num_rows, -1)[some].reshape(inner_of_fewer.shape))
    assert torch.equal(parts_of_fewer, parts[:, some])


@pytest.mark.parametrize("expert", [0, EXPERTS])
def test_pairs_have_the_bits_of_a_dense_layer(
    expert: int, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        dense = Kernel(2, name="_block_scaled_kernel")
        monkeypatch.setattr(block_scaled_product, "_block_scaled_kernel", dense)
    x, routing, layers = make_rows(200, HIDDEN, torch.bfloat16), make_routing(200), make_layers()
    inner, parts = run(x, routing)
    row, choice = (routing.ids == expert).nonzero(as_tuple=True)
    first, down = (part_of(layer.matrix, expert, layer.num_experts) for layer in layers)
    assert isinstance(first, NarrowMatrix)
    assert isinstance(down, NarrowMatrix)
    product = partial(block_scaled_product.block_scaled_product, num_splits=1, adds=False)

    gated = torch.empty(len(row), INNER, dtype=torch.bfloat16, device=DEVICE)
    product(gated, RowCodes(x.codes[row], x.scale[row], x.dtype), first, None, gated=True)
    rounded = round_rows_reference(gated, RowFormat(torch.float8_e4m3fn, 128, 2, INNER))
    assert torch.equal(numbers(rounded), inner.view(200, -1, INNER)[row, choice])

    out = torch.empty(len(row), HIDDEN, device=DEVICE)
    product(out, rounded, down, None, gated=False)
    y = (out * routing.weights[row, choice, None]).bfloat16()
    assert torch.equal(y, parts[choice, row])


def test_nan_stays_in_its_row(kernel: None) -> None:
    x, routing = make_rows(100, HIDDEN, torch.bfloat16), make_routing(100)
    x.scale[5, 2] = torch.nan
    _, parts = run(x, routing)
    is_nan = torch.arange(100, device=DEVICE)[None, :, None].expand(parts.shape) == 5
    assert torch.equal(parts.isnan(), is_nan)


def test_a_prompt_is_multiplied_in_tiles_of_128(
    kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And some outputs are added after others."""
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(experts, "_MOST_PARTS_BYTES", 0)
    monkeypatch.setattr(experts, "_OUTPUTS_AT_ONCE", 384)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(
            experts,
            "add_parts",
            lambda x, parts, norm, num_real: add_parts_reference(x, parts, norm),
        )
    x, routing, (first, down) = (
        make_rows(200, HIDDEN, torch.bfloat16),
        make_routing(200),
        make_layers(),
    )
    inner = experts.expert_activations(x, routing, first, SILU, row_format_of(down))
    assert isinstance(inner, TiledRows)
    residual = torch.zeros(200, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    assert experts.add_experts(residual, inner, routing, down) is None
    _, parts = run(x, routing)
    expected = torch.zeros_like(residual)
    add_parts_reference(expected, parts, None)
    assert torch.equal(residual, expected)


def test_it_is_for_gated_experts_in_tiles_of_128_whose_inner_numbers_are_pairs_of_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    x, routing = make_rows(200, HIDDEN, torch.bfloat16), make_routing(200)
    first, down = make_layers()
    wanted = row_format_of(down)
    assert wanted is not None
    assert module.is_for(x, routing, first, SILU, wanted)
    assert not module.is_for(x, routing, first, RELU_SQUARED, wanted)
    smaller = routing.tiles._replace(pairs=routing.tiles.pairs[:, :64])
    assert not module.is_for(x, routing._replace(tiles=smaller), first, SILU, wanted)
    odd = ExpertMatrix(make_matrix(4 * 2 * 384, HIDDEN), None, 4)
    assert not module.is_for(x, routing, odd, SILU, wanted)
    assert not module.is_for(torch.zeros(200, HIDDEN), routing, first, SILU, wanted)
    assert not module.is_for(x._replace(dtype=torch.float32), routing, first, SILU, wanted)
    assert not module.is_for(x, routing, first, SILU, None)
    assert not module.is_for(x, routing, first, SILU, wanted._replace(group=256))

"""Mixtures of experts, plain or in 4 or 8 bits, against the formulas over plain matrices."""

from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as functional
from grids import pairwise
from products import ALL, NumberFormat, narrow_of
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model import expert_tiles
from outrider.kernels.model import experts as experts_module
from outrider.kernels.model import experts_product as experts_product_module
from outrider.kernels.model.e2m1 import MOST_EXPONENT
from outrider.kernels.model.expert_matrix import (
    RELU_SQUARED,
    SILU,
    Activation,
    ExpertMatrix,
    Glu,
    expert_of,
    layers_in_first,
)
from outrider.kernels.model.experts import (
    activations_by_expert,
    add_by_expert,
    add_experts,
    expert_activations,
)
from outrider.kernels.model.narrow_matrix import NarrowMatrix, narrow_matrix
from outrider.kernels.model.rms_norm import Norm, rms_norm, rms_norm_reference
from outrider.kernels.model.routing import Router, Routing, route
from outrider.kernels.model.row_codes import Rows

NARROW: dict[str, NumberFormat] = {
    "fp8, one scale": ("fp8", ALL, 64, False),
    "fp8 of rows": ("fp8", ALL, 1, False),
    "fp8 of blocks": ("fp8", 128, 64, False),
    "int8 of rows": ("int8", ALL, 1, False),
    "int4": ("int4", 128, 1, False),
    "int4, zero points": ("int4", 32, 1, True),
    "fp4": ("fp4", 32, 1, False),
    "nvfp4": ("nvfp4", 16, 1, False),
}
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
_seeds = count()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(next(_seeds))).to(DEVICE)


def make_matrix(num_experts: int, num_out: int, num_in: int) -> ExpertMatrix:
    generator = torch.Generator().manual_seed(next(_seeds))
    rows = num_experts * num_out
    codes = torch.randint(0, 16, (rows, num_in), generator=generator, dtype=torch.uint8)
    exponent = torch.randint(118, 123, (rows, num_in // 32), generator=generator).to(torch.uint8)
    scale = exponent.to(DEVICE).t().contiguous().view(torch.float8_e8m0fnu)
    matrix = narrow_matrix("fp4", codes.to(DEVICE), scale.float(), group=32)._replace(scale=scale)
    return ExpertMatrix(matrix, randn(rows), num_experts)


class Experts(NamedTuple):
    first: ExpertMatrix
    down: ExpertMatrix
    activation: Activation


def make(num_experts: int = 5, width: int = 128, inner: int = 192) -> Experts:
    first = make_matrix(num_experts, 2 * inner, width)
    return Experts(first, make_matrix(num_experts, width, inner), Glu(1.7, 2.0, 1.0))


def make_plain(
    num_experts: int,
    width: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    activation: Activation = SILU,
) -> Experts:
    def matrix(num_out: int, num_in: int) -> ExpertMatrix:
        numbers = randn(num_experts * num_out, num_in) * num_in**-0.5
        return ExpertMatrix(numbers.to(dtype), None, num_experts)

    first = matrix(layers_in_first(activation) * inner, width)
    return Experts(first, matrix(width, inner), activation)


def make_narrow(
    name: str, num_experts: int, width: int, inner: int, activation: Activation = SILU
) -> Experts:
    def matrix(num_out: int, num_in: int) -> ExpertMatrix:
        made = narrow_of(NARROW[name], num_experts * num_out, num_in)
        return ExpertMatrix(made, None, num_experts)

    first = matrix(layers_in_first(activation) * inner, width)
    return Experts(first, matrix(width, inner), activation)


def of_bfloat16(experts: Experts) -> Experts:
    def matrix(layer: ExpertMatrix) -> ExpertMatrix:
        assert layer.bias is not None
        return layer._replace(bias=layer.bias.bfloat16())

    return experts._replace(first=matrix(experts.first), down=matrix(experts.down))


def make_of_bfloat16(name: str, num_experts: int, width: int) -> Experts:
    if name == "plain":
        return make_plain(num_experts, width, width, torch.bfloat16)
    if name == "mxfp4":
        return of_bfloat16(make(num_experts, width, width))
    return make_narrow(name, num_experts, width, width)


def add(
    residual: torch.Tensor,
    x: torch.Tensor,
    routing: Routing,
    experts: Experts,
    norm: Norm | None = None,
) -> Rows | None:
    inner = expert_activations(x, routing, experts.first, experts.activation)
    return add_experts(residual, inner, routing, experts.down, norm)


def add_reference(
    residual: torch.Tensor, x: torch.Tensor, routing: Routing, experts: Experts
) -> None:
    def of(layer: ExpertMatrix) -> Any:
        return lambda e, rows: functional.linear(rows, *expert_of(layer, e, rows.dtype))

    num_inner = experts.first.num_out // layers_in_first(experts.activation)
    first = of(experts.first)
    inner = activations_by_expert(x, routing, first, num_inner, experts.activation)
    add_by_expert(residual, inner, routing, of(experts.down))


def by_formulas(x: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """Every expert's output for every row, times its weight, if the row chose it; in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)

    def product(layer: ExpertMatrix, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        matrix, bias = expert_of(layer, expert, torch.float64)
        return inputs @ matrix.T + (0 if bias is None else bias.double())

    def activated(y: torch.Tensor) -> torch.Tensor:
        if (glu := experts.activation) == RELU_SQUARED:
            return y.clamp(min=0) ** 2
        gate, up = y.chunk(2, 1)
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
        return (up + glu.shift) * gate * (glu.alpha * gate).sigmoid()

    for expert in range(experts.first.num_experts):
        inner = activated(product(experts.first, expert, x.double()))
        weight = routing.weights.double().where(routing.ids == expert, 0).sum(1, keepdim=True)
        out += weight * product(experts.down, expert, inner)
    return out


@needs_kernels
@pytest.mark.parametrize("activation", [SILU, RELU_SQUARED])
def test_shared_experts_are_slices_of_one_that_is_wider(activation: Activation) -> None:
    """It computes the same by itself, times its gate."""
    num_layers, width, inner = layers_in_first(activation), 64, 48
    experts = make_plain(4 + 2, width, inner, activation=activation)
    x, logits = randn(21, width), randn(21, 5)
    router = Router(2, num_shared=2, gate=4)
    got = torch.zeros_like(x)
    add(got, x, route(logits, router), experts)
    first, down = (layer.matrix.double() for layer in (experts.first, experts.down))
    # [layers of the first, slices, inner], then of all slices.
    wide = first.view(6, num_layers, inner, width)[4:].transpose(0, 1).flatten(1, 2)
    y = torch.einsum("tk,lnk->ltn", x.double(), wide)
    y = torch.nn.functional.silu(y[0]) * y[1] if num_layers == 2 else y[0].relu() ** 2
    shared = y @ down.view(6, width, inner)[4:].transpose(0, 1).flatten(1).t()
    of_chosen = by_formulas(x, route(logits[:, :4], Router(2)), experts)
    expected = of_chosen + logits[:, 4:].double().sigmoid() * shared
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize(
    ("num_real", "num_rows"),
    # Nobody is real, or all are; one program lists an expert's pairs, or several do.
    [(0, 40), (17, 40), (40, 40), (1, 200), (130, 200)],
)
def test_padding_rows_have_no_experts_and_change_nothing(
    num_real: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "_SLICE", 256)
    experts, x, logits = make_plain(7, 64, 48), randn(num_rows, 64), randn(num_rows, 7)
    routing = route(logits, Router(3), torch.tensor([num_real], device=DEVICE))
    assert (routing.ids[num_real:] == -1).all()
    assert (routing.weights[num_real:] == 0).all()
    used = routing.tiles.pairs[routing.tiles.pairs < routing.ids.numel()]
    assert sorted(used.tolist()) == list(range(3 * num_real))
    is_read = routing.tiles.experts < 7
    assert set(routing.tiles.experts[is_read].tolist()) == set(
        routing.ids[:num_real].unique().tolist()
    )
    alone = torch.zeros_like(x[:num_real])
    if num_real:
        add(alone, x[:num_real], route(logits[:num_real], Router(3)), experts)
    together, by_reference = torch.zeros_like(x), torch.zeros_like(x)
    add(together, x, routing, experts)
    add_reference(by_reference, x, routing, experts)
    torch.testing.assert_close(together[:num_real], alone)
    assert (together[num_real:] == 0).all()
    torch.testing.assert_close(together, by_reference)


@needs_kernels
@pytest.mark.parametrize(
    ("num_rows", "with_norm", "kind"),
    pairwise([1, 7, 60], [False, True], ["plain", "mxfp4", "no gates"]),
)
def test_kernel_equals_the_formulas(num_rows: int, with_norm: bool, kind: str) -> None:
    activation: Activation = RELU_SQUARED if kind == "no gates" else SILU
    experts = make() if kind == "mxfp4" else make_plain(5, 128, 200, activation=activation)
    x = randn(num_rows, 131)[:, :128]  # rows need not follow each other
    residual = randn(num_rows, 128)
    norm = Norm(randn(128), 1e-5) if with_norm else None
    routing = route(randn(num_rows, 5), Router(2))
    expected = residual.double() + by_formulas(x, routing, experts)
    plain = residual.clone()
    add_reference(plain, x, routing, experts)
    torch.testing.assert_close(plain.double(), expected, rtol=1e-4, atol=1e-4)
    normed = add(residual, x, routing, experts, norm)
    torch.testing.assert_close(residual.double(), expected, rtol=1e-4, atol=1e-4)
    assert (normed is None) == (norm is None)
    if norm is not None:
        wide = Norm(norm.weight.double(), norm.eps)
        torch.testing.assert_close(
            normed, rms_norm_reference(expected, wide).float(), rtol=1e-3, atol=1e-3
        )


@needs_kernels
@pytest.mark.parametrize(
    ("name", "num_rows", "size", "activation"),
    [
        (name, *((1, 16), (9, 32), (17, 128))[i % 3], (SILU, RELU_SQUARED)[i % 2])
        for i, name in enumerate(sorted(NARROW))
    ],
)
def test_narrow_matrices_of_every_format(
    name: str, num_rows: int, size: int, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "_TILES", (size,))
    experts, x = (
        make_narrow(name, 3, 192, 192 // layers_in_first(activation), activation),
        randn(num_rows, 192),
    )
    routing = route(randn(num_rows, 3), Router(2))
    residual, plain = torch.zeros_like(x), torch.zeros_like(x)
    add(residual, x, routing, experts)
    add_reference(plain, x, routing, experts)
    expected = by_formulas(x, routing, experts)
    for got in (residual, plain):
        assert (got.double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.skipif(DEVICE.type == "cpu" and HAS_KERNELS, reason="the interpreter lacks bfloat16")
@pytest.mark.parametrize("num_rows", [1, 40, 300])
@pytest.mark.parametrize("width", [64, 128, 448])  # a loop of one turn, longer ones, several turns
@pytest.mark.parametrize("name", ["plain", "mxfp4", *sorted(NARROW)])
def test_bfloat16_equals_the_formulas_but_for_rounding(
    num_rows: int, width: int, name: str
) -> None:
    experts, x = make_of_bfloat16(name, 3, width), randn(num_rows, width).bfloat16()
    routing = route(randn(num_rows, 3), Router(2))
    residual = torch.zeros_like(x)
    add(residual, x, routing, experts)
    expected = by_formulas(x, routing, experts)
    assert (residual.double() - expected).norm() < 0.01 * expected.norm()


@needs_kernels
@pytest.mark.parametrize("width", [24, 64, 200])
def test_plain_matrices_of_any_width(width: int) -> None:
    experts, x = make_plain(4, width, width // 2 + 3), randn(9, width)
    routing = route(randn(9, 4), Router(2, over_all=True))
    residual = torch.zeros_like(x)
    add(residual, x, routing, experts)
    torch.testing.assert_close(
        residual.double(), by_formulas(x, routing, experts), rtol=1e-4, atol=1e-4
    )


@needs_kernels
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_tiles_of_every_size(size: int, is_plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_tiles, "_TILES", (size,))
    experts, x = (make_plain if is_plain else make)(3, 64, 64), randn(90, 64)
    logits = randn(90, 3)
    logits[:, 2] -= 1.5
    routing = route(logits, Router(2))
    assert routing.tiles.pairs.shape[1] == size
    if size == 128:  # of the tiles some are at most half full, others a little fuller
        pairs = routing.tiles.pairs[routing.tiles.experts < 3]
        assert set((pairs[:, 64] < 180).tolist()) == {True, False}
    residual = torch.zeros_like(x)
    add(residual, x, routing, experts)
    torch.testing.assert_close(
        residual.double(), by_formulas(x, routing, experts), rtol=1e-4, atol=1e-4
    )


@needs_kernels
@pytest.mark.parametrize("activation", [SILU, RELU_SQUARED])
def test_wide_tiles_of_a_hopper_gpu(
    activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "_TILES", (128,))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(experts_product_module, "is_hopper", lambda _: True)
    experts, x = make_plain(2, 256, 256, torch.float16, activation), randn(150, 256).half()
    routing = route(randn(150, 2), Router(1))
    residual = torch.zeros_like(x)
    add(residual, x, routing, experts)
    torch.testing.assert_close(
        residual.double(), by_formulas(x, routing, experts), rtol=1e-2, atol=1e-2
    )


@needs_kernels
def test_scales_of_every_exponent() -> None:
    """2^-127 is subnormal; 2^65 is the largest that is served."""
    experts = make(1, 64, 64)
    matrix = experts.down.matrix
    assert isinstance(matrix, NarrowMatrix)
    exponent = matrix.scale.view(torch.uint8)
    exponent[0], exponent[1] = 0, MOST_EXPONENT
    x, routing = randn(3, 64), route(randn(3, 1), Router(1))
    residual = torch.zeros_like(x)
    add(residual, x, routing, experts)
    expected = by_formulas(x, routing, experts)
    # Of the largest: sums of such numbers may cancel out.
    torch.testing.assert_close(
        residual.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item()
    )


@needs_kernels
def test_what_is_not_a_number_stays_in_its_row() -> None:
    experts = make()
    x, logits = randn(20, 128), randn(20, 5)
    clean = torch.zeros_like(x)
    add(clean, x, route(logits, Router(2)), experts)
    x[4], logits[4] = torch.nan, torch.nan
    residual = torch.zeros_like(x)
    add(residual, x, route(logits, Router(2)), experts)
    others = torch.arange(20, device=DEVICE) != 4
    torch.testing.assert_close(residual[others], clean[others])
    assert residual[4].isnan().all()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter's products are numpy's")
@pytest.mark.parametrize(
    ("name", "width"),
    [("plain", 1024), *((name, 960) for name in ["plain", "mxfp4", *sorted(NARROW)])],
)
def test_a_row_comes_out_the_same_in_any_company(name: str, width: int) -> None:
    experts = make_of_bfloat16(name, 8, width)
    logits, x = randn(900, 8), randn(900, width).bfloat16()

    router = Router(4, num_shared=2, gate=6)

    def outputs(some: slice) -> torch.Tensor:
        out = torch.zeros_like(x[some])
        add(out, x[some], route(logits[some], router), experts)
        return out

    whole = outputs(slice(None))
    lengths = [(600 - n, 600) for n in range(1, 301, 7)]
    for first, last in ((0, 1), (3, 20), (7, 40), (70, 200), (100, 600), *lengths):
        assert torch.equal(outputs(slice(first, last)), whole[first:last])


@needs_kernels
@pytest.mark.parametrize("name", ["plain", "mxfp4", "int4", "nvfp4"])
def test_a_prompt_adds_some_outputs_after_others_in_bounded_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what all at once give; padding rows too, and a last piece that is narrower."""
    wide, small = 320, 128
    experts = {"plain": lambda: make_plain(3, wide, small), "mxfp4": lambda: make(3, wide, small)}
    made = experts[name]() if name in experts else make_narrow(name, 3, wide, small)
    x, residual = randn(21, wide), randn(21, wide)
    routing = route(randn(21, 3), Router(2), torch.tensor([19], device=DEVICE))
    norm = Norm(randn(wide), 1e-5)
    whole = residual.clone()
    normed = add(whole, x, routing, made, norm)
    assert isinstance(normed, torch.Tensor)
    product, shapes = experts_module.experts_product, []

    def watched(*args: Any) -> torch.Tensor:
        parts = product(*args)
        shapes.append(tuple(parts.shape))
        return parts

    monkeypatch.setattr(experts_module, "experts_product", watched)
    monkeypatch.setattr(experts_module, "_MOST_PARTS_BYTES", 2 * 21 * wide * 4 - 1)
    monkeypatch.setattr(experts_module, "_OUTPUTS_AT_ONCE", 128)
    assert add(residual, x, routing, made, norm) is None
    assert torch.equal(residual, whole)
    assert torch.equal(rms_norm(residual, norm), normed)
    assert shapes[1:] == [(2, 21, 128), (2, 21, 128), (2, 21, 64)]

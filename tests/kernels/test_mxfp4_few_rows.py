"""Experts of few rows in MXFP4 on Hopper GPUs.

On a CPU their kernel runs in plain torch.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import block_scaled
import pytest
import torch
from block_scaled import interpreted, on_gpu
from few_rows_of_experts import (
    EXPERTS,
    GLU,
    TOP_K,
    activations_of,
    always_by,
    make_routing,
    parts_of,
)
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model import experts_trial as trial
from outrider.kernels.model import mxfp4_few_rows as module
from outrider.kernels.model import warpgroups
from outrider.kernels.model.expert_matrix import RELU_SQUARED, ExpertMatrix
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.mxfp4_few_rows import few_rows_of_experts
from outrider.kernels.model.narrow_matrix import narrow_matrix
from outrider.kernels.model.routing import Routing
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS

NAME = "_few_rows_of_experts_kernel"


def make_layer(num_out: int, num_in: int, *, bias: bool = True) -> ExpertMatrix:
    generator = torch.Generator().manual_seed(num_out + num_in)
    rows = EXPERTS * num_out
    codes = torch.randint(0, 16, (rows, num_in), generator=generator, dtype=torch.uint8)
    exponent = torch.randint(118, 123, (rows, num_in // 32), generator=generator).to(torch.uint8)
    scale = exponent.to(DEVICE).t().contiguous().view(torch.float8_e8m0fnu)
    matrix = narrow_matrix("fp4", codes.to(DEVICE), scale.float(), group=32)._replace(scale=scale)
    return ExpertMatrix(matrix, normals(rows)(rows).bfloat16() if bias else None, EXPERTS)


def activations(x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
    out = x.new_full((routing.ids.numel(), layer.num_out // 2), torch.nan)
    few_rows_of_experts(out, x, routing, layer, GLU)
    return out


def parts(x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
    out = x.new_full((TOP_K, len(routing.ids), layer.num_out), torch.nan)
    few_rows_of_experts(out, x, routing, layer, None)
    return out


def with_tiling(
    monkeypatch: pytest.MonkeyPatch, tiles: int, stages: int | None, seed: int = 0
) -> None:
    """In plain torch, with at most so many stages."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, NAME, Kernel(None, seed, NAME))
    monkeypatch.setattr(module, "_tiling", lambda *_: module._Tiling(tiles, 1))
    if stages is not None:
        monkeypatch.setattr(module, "stages_ahead", lambda num, *_: min(num, stages))


# Rows, the size of tiles, outputs, inputs, tiles of outputs in a program, stages: inputs that are
# no whole stages and outputs that are no whole programs among them.
CASES = [
    (1, 16, 64, 64, 1, None),
    (5, 16, 192, 320, 2, 2),
    (9, 16, 64, 576, 1, 3),
    (7, 16, 128, 832, 2, 1),
    (30, 16, 320, 832, 2, 2),
    (40, 32, 192, 832, 2, None),
    (90, 64, 64, 448, 1, 2),
]


@interpreted
@pytest.mark.parametrize(("num_rows", "size", "num_out", "num_in", "tiles", "stages"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_they_are_the_products_of_the_numbers_that_codes_stand_for(
    num_rows: int, size: int, num_out: int, num_in: int, tiles: int, stages: int | None,
    bias: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with_tiling(monkeypatch, tiles, stages, num_rows)
    routing = make_routing(num_rows, size)
    first, down = (make_layer(num, num_in, bias=bias) for num in (2 * num_out, num_out))
    x = normals(1)(num_rows, num_in).bfloat16()
    expected = activations_of(x, routing, first)
    assert (activations(x, routing, first) - expected).norm() < 5e-3 * expected.norm()
    x = normals(2)(num_rows * TOP_K, num_in).bfloat16()
    expected = parts_of(x, routing, down)
    assert (parts(x, routing, down) - expected).norm() < 5e-3 * expected.norm()


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_warps_and_copies_gives_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing, layer = make_routing(20, 16), make_layer(128, 1600)
    x = normals(1)(20, 1600).bfloat16()
    outs = []
    for each in (100, seed):
        with_tiling(monkeypatch, 2, 2, each)
        outs.append(activations(x, routing, layer))
    assert torch.equal(*outs)


@interpreted
def test_nan_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiling(monkeypatch, 1, 2)
    routing, layer = make_routing(12, 16), make_layer(128, 320)
    x = normals(1)(12, 320).bfloat16()
    whole = activations(x, routing, layer)
    x[5, 300] = torch.nan
    found = activations(x, routing, layer)
    is_row = torch.arange(12).repeat_interleave(TOP_K) == 5
    assert torch.equal(found[~is_row], whole[~is_row])
    assert found[is_row].isnan().all()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Tries the kernel as on a Hopper GPU; whether it is for a layer then."""
    monkeypatch.setattr(module, "failed", set())
    for place in (module, trial):
        monkeypatch.setattr(place, "has_warpgroups", lambda _: True)

    monkeypatch.setattr(trial, "experts_product", always_by(module))

    def is_for() -> bool:
        trial.try_mxfp4_few_rows(torch.device("cpu"), torch.bfloat16)
        routing, x = make_routing(3, 16), torch.zeros(3, 64).bfloat16()
        return module.is_for(x, make_layer(64, 64), routing, None)

    trial.try_mxfp4_few_rows.cache_clear()
    yield is_for
    trial.try_mxfp4_few_rows.cache_clear()


def few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the trial take fewer than it does, in plain torch."""
    with_tiling(monkeypatch, 2, 2)
    monkeypatch.setattr(trial, "_MXFP4_ROWS", ((7, True), (13, False)))
    monkeypatch.setattr(trial, "_NUM_IN", 576)


@interpreted
def test_the_trial_takes_every_form_and_fills_stages_again(
    tried: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an H200."""
    launched: list[dict[str, Any]] = []
    forms = set()
    tiling_of = module._tiling

    def noted(rows: int, *args: Any) -> module._Tiling:
        forms.add((rows, *(tiling := tiling_of(rows, *args))))
        return tiling

    class Noted:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **options: launched.append(options)

    monkeypatch.setattr(module, NAME, Noted())
    monkeypatch.setattr(module, "_tiling", noted)
    monkeypatch.setattr(warpgroups, "shared_bytes", lambda _: 232_448)
    for place in (module, trial):
        monkeypatch.setattr(place, "num_programs", lambda _, per_sm: 132 * per_sm)
    tried()
    assert forms == {(8, 1, 3), (8, 1, 4), (16, 1, 4), (32, 1, 4), (64, 2, 2)}
    for options in launched:
        assert options["STAGES"] * 256 < options["NUM_IN"]
        assert options["TILES"] == 1 or trial._NUM_OUT % (64 * options["TILES"]) > 0


@interpreted
def test_it_is_used_where_it_works(
    tried: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_products(monkeypatch)
    assert tried()


@interpreted
@pytest.mark.parametrize("what", ["raises", "wrong"])
def test_it_is_not_used_where_it_fails(
    what: str, tried: Callable[[], bool], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    few_products(monkeypatch)
    multiply: Callable[..., Tensor] = trial.experts_product

    def failing(*args: Any) -> Tensor:
        if len(args) == 5:
            return multiply(*args)
        if what == "raises":
            raise RuntimeError("no such instruction")
        return multiply(*args).nextafter(torch.tensor(9.0).bfloat16())

    monkeypatch.setattr(trial, "experts_product", failing)
    assert not tried()
    assert "slower kernel" in caplog.text


@interpreted
def test_other_layers_are_for_any_gpus_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    layer, routing, x = make_layer(128, 64), make_routing(3, 16), torch.zeros(3, 64).bfloat16()
    assert module.is_for(x, layer, routing, GLU)
    assert not module.is_for(x, layer, routing, RELU_SQUARED)
    assert not module.is_for(x.float(), layer, routing, GLU)
    assert not module.is_for(torch.zeros(200).bfloat16()[4:-4].view(3, 64), layer, routing, GLU)
    assert not module.is_for(x, layer, make_routing(3, 128), GLU)
    assert not module.is_for(x, layer._replace(matrix=torch.zeros(640, 64)), routing, GLU)
    assert not module.is_for(x, make_layer(96, 64), routing, None)


@on_gpu
@pytest.mark.parametrize("num_in", [256, 320, 2880])
def test_rows_have_the_bits_of_the_kernel_for_any_gpu(
    num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of any size, in few and in many, and alone."""
    first, down = make_layer(704, num_in), make_layer(320, num_in)
    outs, tilings = [], []
    tiling_of = module._tiling

    def noted(*args: Any) -> module._Tiling:
        tilings.append(tiling_of(*args))
        return tilings[-1]

    monkeypatch.setattr(module, "_tiling", noted)
    for num_rows, size, num_empty in (
        (1, 16, 2), (8, 16, 2), (8, 16, 500), (60, 16, 2), (60, 32, 2), (200, 64, 2)
    ):  # fmt: skip
        few = make_routing(num_rows, size, num_empty)
        x = normals(1)(200, num_in).bfloat16()[:num_rows]
        pairs = normals(2)(200 * TOP_K, num_in).bfloat16()[: num_rows * TOP_K]
        ours = activations(x, few, first), parts(pairs, few, down)
        with monkeypatch.context() as changed:
            changed.setattr(module, "is_for", lambda *_: False)
            for_any = experts_product(x, few, first, GLU), experts_product(pairs, few, down, None)
        for one, other in zip(ours, for_any, strict=True):
            assert torch.equal(one, other)
        outs.append((ours[0][:TOP_K], ours[1][:, :1]))
    assert all(torch.equal(a[i], b[i]) for a, b in pairwise(outs) for i in range(2))
    assert set(tilings) == {(1, 3), (1, 4), (2, 2)}

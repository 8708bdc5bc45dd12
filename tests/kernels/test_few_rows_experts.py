"""Experts of few rows in 16 bits on Hopper GPUs.

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
from outrider.kernels.model import few_rows_experts as module
from outrider.kernels.model.expert_matrix import RELU_SQUARED, ExpertMatrix
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.few_rows_experts import few_rows_of_experts
from outrider.kernels.model.routing import Routing
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS

NAME = "_few_rows_of_plain_experts_kernel"


def make_layer(num_out: int, num_in: int, *, bias: bool = True) -> ExpertMatrix:
    rows, randn = EXPERTS * num_out, normals(num_out + num_in)
    matrix, numbers = (randn(rows, num_in) / num_in**0.5).bfloat16(), randn(rows).bfloat16()
    return ExpertMatrix(matrix, numbers if bias else None, EXPERTS)


def activations(x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
    out = x.new_full((routing.ids.numel(), layer.num_out // 2), torch.nan)
    few_rows_of_experts(out, x, routing, layer, GLU)
    return out


def parts(x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
    out = x.new_full((TOP_K, len(routing.ids), layer.num_out), torch.nan)
    few_rows_of_experts(out, x, routing, layer, None)
    return out


def with_stages(monkeypatch: pytest.MonkeyPatch, most: int, seed: int = 0) -> None:
    """In plain torch, with at most so many stages."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, NAME, Kernel(None, seed, NAME))
    monkeypatch.setattr(module, "stages_ahead", lambda num, *_: min(num, most))


# Rows, outputs, inputs, stages: one that is never filled again, and some that are, among them.
CASES = [(1, 64, 64, 2), (5, 192, 320, 2), (9, 64, 576, 3), (30, 128, 192, 12)]


@interpreted
@pytest.mark.parametrize(("num_rows", "num_out", "num_in", "stages"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_they_are_the_products(
    num_rows: int, num_out: int, num_in: int, stages: int, bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with_stages(monkeypatch, stages, num_rows)
    routing = make_routing(num_rows, 16)
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
    routing, layer = make_routing(20, 16), make_layer(128, 448)
    x = normals(1)(20, 448).bfloat16()
    outs = []
    for each in (100, seed):
        with_stages(monkeypatch, 2, each)
        outs.append(activations(x, routing, layer))
    assert torch.equal(*outs)


@interpreted
def test_nan_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with_stages(monkeypatch, 2)
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
    with_stages(monkeypatch, 2)
    monkeypatch.setattr(trial, "_NUM_IN", 320)

    monkeypatch.setattr(trial, "experts_product", always_by(module))

    def is_for() -> bool:
        trial.try_few_rows_experts(torch.device("cpu"), torch.bfloat16)
        routing, x = make_routing(3, 16), torch.zeros(3, 64).bfloat16()
        return module.is_for(x, make_layer(64, 64), routing, None)

    trial.try_few_rows_experts.cache_clear()
    yield is_for
    trial.try_few_rows_experts.cache_clear()


@interpreted
def test_the_trial_takes_every_form(
    tried: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []

    class Noted:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **options: launched.append(options)

    monkeypatch.setattr(module, NAME, Noted())
    tried()
    assert {each["ROWS"] for each in launched} == {8, 16}
    assert {each["GATED"] for each in launched} == {False, True}


@interpreted
def test_it_is_used_where_it_works(tried: Callable[[], bool]) -> None:
    assert tried()


@interpreted
def test_it_is_not_used_where_it_fails(
    tried: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    multiply: Callable[..., Tensor] = trial.experts_product

    def wrong(*args: Any) -> Tensor:
        found = multiply(*args)
        return found if len(args) == 5 else found.nextafter(torch.tensor(9.0).bfloat16())

    monkeypatch.setattr(trial, "experts_product", wrong)
    assert not tried()
    assert "slower kernel" in caplog.text


@interpreted
def test_other_layers_are_for_any_gpus_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_warpgroups", lambda _: True)
    layer, routing, x = make_layer(128, 64), make_routing(3, 16), torch.zeros(3, 64).bfloat16()
    assert module.is_for(x, layer, routing, GLU)
    assert not module.is_for(x, layer, routing, RELU_SQUARED)
    assert not module.is_for(x.half(), layer, routing, GLU)
    assert not module.is_for(torch.zeros(200).bfloat16()[4:-4].view(3, 64), layer, routing, GLU)
    assert not module.is_for(x, layer, make_routing(3, 32), GLU)
    assert not module.is_for(x, layer, make_routing(module.MOST_ROWS + 1, 16), GLU)
    assert not module.is_for(x, layer._replace(matrix=torch.zeros(640, 64)), routing, GLU)
    assert not module.is_for(x, make_layer(96, 64), routing, None)
    assert not module.is_for(x, make_layer(128, 96), routing, None)


@on_gpu
@pytest.mark.parametrize("num_in", [64, 320, 2048])
def test_rows_have_the_bits_of_the_kernel_for_any_gpu(
    num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and in few and many tiles."""
    first, down = make_layer(704, num_in), make_layer(320, num_in)
    outs = []
    for num_rows, num_empty in ((1, 2), (8, 2), (8, 500), (60, 2)):
        few = make_routing(num_rows, 16, num_empty)
        x = normals(1)(60, num_in).bfloat16()[:num_rows]
        pairs = normals(2)(60 * TOP_K, num_in).bfloat16()[: num_rows * TOP_K]
        ours = activations(x, few, first), parts(pairs, few, down)
        with monkeypatch.context() as changed:
            changed.setattr(module, "is_for", lambda *_: False)
            for_any = experts_product(x, few, first, GLU), experts_product(pairs, few, down, None)
        for one, other in zip(ours, for_any, strict=True):
            assert torch.equal(one, other)
        outs.append((ours[0][:TOP_K], ours[1][:, :1]))
    assert all(torch.equal(a[i], b[i]) for a, b in pairwise(outs) for i in range(2))

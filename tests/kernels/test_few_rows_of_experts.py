"""Experts of few rows on Hopper GPUs, in 16 bits and in MXFP4.

On a CPU their kernels run in plain torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from outrider.kernels.model import few_rows_experts, mxfp4_few_rows, warpgroups
from outrider.kernels.model.expert_matrix import RELU_SQUARED, ExpertMatrix
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.narrow_matrix import NarrowMatrix, narrow_matrix
from outrider.kernels.model.routing import Routing
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS


def plain_matrix(rows: int, num_in: int) -> Tensor:
    return (normals(rows + num_in)(rows, num_in) / num_in**0.5).bfloat16()


def mxfp4_matrix(rows: int, num_in: int) -> NarrowMatrix:
    generator = torch.Generator().manual_seed(rows + num_in)
    codes = torch.randint(0, 16, (rows, num_in), generator=generator, dtype=torch.uint8)
    exponent = torch.randint(118, 123, (rows, num_in // 32), generator=generator).to(torch.uint8)
    scale = exponent.to(DEVICE).t().contiguous().view(torch.float8_e8m0fnu)
    return narrow_matrix("fp4", codes.to(DEVICE), scale.float(), group=32)._replace(scale=scale)


@dataclass(frozen=True)
class Kind:
    """A kernel, what it multiplies by, and its trial."""

    module: Any
    kernel: str
    make_matrix: Callable[[int, int], Tensor | NarrowMatrix]
    try_it: Any

    def make_layer(self, num_out: int, num_in: int, *, bias: bool = True) -> ExpertMatrix:
        rows = EXPERTS * num_out
        numbers = normals(rows)(rows).bfloat16() if bias else None
        return ExpertMatrix(self.make_matrix(rows, num_in), numbers, EXPERTS)

    def activations(self, x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
        out = x.new_full((routing.ids.numel(), layer.num_out // 2), torch.nan)
        self.module.few_rows_of_experts(out, x, routing, layer, GLU)
        return out

    def parts(self, x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
        out = x.new_full((TOP_K, len(routing.ids), layer.num_out), torch.nan)
        self.module.few_rows_of_experts(out, x, routing, layer, None)
        return out

    def with_stages(
        self, monkeypatch: pytest.MonkeyPatch, most: int, *, tiles: int = 1, seed: int = 0
    ) -> None:
        """In plain torch, with at most so many stages and, in MXFP4, tiles of outputs in a
        program.
        """
        if DEVICE.type == "cpu":
            monkeypatch.setattr(self.module, self.kernel, Kernel(None, seed, self.kernel))
        monkeypatch.setattr(self.module, "stages_ahead", lambda num, *_: min(num, most))
        monkeypatch.setattr(mxfp4_few_rows, "_tiling", lambda *_: mxfp4_few_rows._Tiling(tiles, 1))


PLAIN = Kind(
    few_rows_experts, "_few_rows_of_plain_experts_kernel", plain_matrix, trial.try_few_rows_experts
)
MXFP4 = Kind(mxfp4_few_rows, "_few_rows_of_experts_kernel", mxfp4_matrix, trial.try_mxfp4_few_rows)


@pytest.fixture(params=[PLAIN, MXFP4], ids=["16 bits", "MXFP4"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


# Rows, the size of tiles, outputs, inputs, tiles of outputs in a program, stages: one that is never
# filled again, and some that are, and inputs that are no whole stages and outputs that are no whole
# programs among them.
CASES = [
    (PLAIN, 1, 16, 64, 64, 1, 2),
    (PLAIN, 5, 16, 192, 320, 1, 2),
    (PLAIN, 9, 16, 64, 576, 1, 3),
    (PLAIN, 30, 16, 128, 192, 1, 12),
    (MXFP4, 1, 16, 64, 64, 1, 9),
    (MXFP4, 5, 16, 192, 320, 2, 2),
    (MXFP4, 9, 16, 64, 576, 1, 3),
    (MXFP4, 7, 16, 128, 832, 2, 1),
    (MXFP4, 30, 16, 320, 832, 2, 2),
    (MXFP4, 40, 32, 192, 832, 2, 9),
    (MXFP4, 90, 64, 64, 448, 1, 2),
]


@interpreted
@pytest.mark.parametrize(
    ("kind", "num_rows", "size", "num_out", "num_in", "tiles", "stages"), CASES
)
@pytest.mark.parametrize("bias", [False, True])
def test_they_are_the_products_of_the_numbers_that_codes_stand_for(
    kind: Kind, num_rows: int, size: int, num_out: int, num_in: int, tiles: int, stages: int,
    bias: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kind.with_stages(monkeypatch, stages, tiles=tiles, seed=num_rows)
    routing = make_routing(num_rows, size)
    first, down = (kind.make_layer(num, num_in, bias=bias) for num in (2 * num_out, num_out))
    x = normals(1)(num_rows, num_in).bfloat16()
    expected = activations_of(x, routing, first)
    assert (kind.activations(x, routing, first) - expected).norm() < 5e-3 * expected.norm()
    x = normals(2)(num_rows * TOP_K, num_in).bfloat16()
    expected = parts_of(x, routing, down)
    assert (kind.parts(x, routing, down) - expected).norm() < 5e-3 * expected.norm()


@interpreted
@pytest.mark.parametrize(("kind", "num_in"), [(PLAIN, 448), (MXFP4, 1600)])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_warps_and_copies_gives_the_same(
    kind: Kind, num_in: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing, layer = make_routing(20, 16), kind.make_layer(128, num_in)
    x = normals(1)(20, num_in).bfloat16()
    outs = []
    for each in (100, seed):
        kind.with_stages(monkeypatch, 2, tiles=2, seed=each)
        outs.append(kind.activations(x, routing, layer))
    assert torch.equal(*outs)


@interpreted
def test_nan_stays_in_its_row(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    kind.with_stages(monkeypatch, 2)
    routing, layer = make_routing(12, 16), kind.make_layer(128, 320)
    x = normals(1)(12, 320).bfloat16()
    whole = kind.activations(x, routing, layer)
    x[5, 300] = torch.nan
    found = kind.activations(x, routing, layer)
    is_row = torch.arange(12).repeat_interleave(TOP_K) == 5
    assert torch.equal(found[~is_row], whole[~is_row])
    assert found[is_row].isnan().all()


@pytest.fixture
def tried(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Tries the kernel as on a Hopper GPU; whether it is for a layer then."""
    monkeypatch.setattr(kind.module, "failed", set())
    for place in (kind.module, trial):
        monkeypatch.setattr(place, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(trial, "experts_product", always_by(kind.module))

    def is_for() -> bool:
        kind.try_it(torch.device("cpu"), torch.bfloat16)
        routing, x = make_routing(3, 16), torch.zeros(3, 64).bfloat16()
        found: bool = kind.module.is_for(x, kind.make_layer(64, 64), routing, None)
        return found

    kind.try_it.cache_clear()
    yield is_for
    kind.try_it.cache_clear()


@pytest.fixture
def launched(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """With which options the kernel was launched, in place of which nothing runs."""
    options: list[dict[str, Any]] = []

    class Noted:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **given: options.append(given)

    monkeypatch.setattr(kind.module, kind.kernel, Noted())
    return options


@pytest.fixture
def few_products(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the trial take fewer than it does, in plain torch."""
    kind.with_stages(monkeypatch, 2, tiles=2)
    monkeypatch.setattr(trial, "_MXFP4_ROWS", ((7, True), (13, False)))
    monkeypatch.setattr(trial, "_NUM_IN", 320 if kind is PLAIN else 576)


@interpreted
@pytest.mark.parametrize("kind", [PLAIN])
@pytest.mark.usefixtures("kind")
def test_the_trial_takes_every_form(
    tried: Callable[[], bool], launched: list[dict[str, Any]]
) -> None:
    tried()
    assert {each["ROWS"] for each in launched} == {8, 16}
    assert {each["GATED"] for each in launched} == {False, True}


@interpreted
@pytest.mark.parametrize("kind", [MXFP4])
@pytest.mark.usefixtures("kind")
def test_the_trial_takes_every_form_and_fills_stages_again(
    tried: Callable[[], bool], launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an H200."""
    forms = set()
    tiling_of = mxfp4_few_rows._tiling

    def noted(rows: int, *args: Any) -> mxfp4_few_rows._Tiling:
        forms.add((rows, *(tiling := tiling_of(rows, *args))))
        return tiling

    monkeypatch.setattr(mxfp4_few_rows, "_tiling", noted)
    monkeypatch.setattr(warpgroups, "shared_bytes", lambda _: 232_448)
    for place in (mxfp4_few_rows, trial):
        monkeypatch.setattr(place, "num_programs", lambda _, per_sm: 132 * per_sm)
    tried()
    assert forms == {(8, 1, 3), (8, 1, 4), (16, 1, 4), (32, 1, 4), (64, 2, 2)}
    for options in launched:
        assert options["STAGES"] * 256 < options["NUM_IN"]
        assert options["TILES"] == 1 or trial._NUM_OUT % (64 * options["TILES"]) > 0


@interpreted
@pytest.mark.usefixtures("few_products")
def test_it_is_used_where_it_works(tried: Callable[[], bool]) -> None:
    assert tried()


@interpreted
@pytest.mark.parametrize("what", ["raises", "wrong"])
@pytest.mark.usefixtures("few_products")
def test_it_is_not_used_where_it_fails(
    what: str, tried: Callable[[], bool], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
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
def test_other_layers_are_for_any_gpus_kernel(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind.module, "has_warpgroups", lambda _: True)
    layer, routing, x = kind.make_layer(128, 64), make_routing(3, 16), torch.zeros(3, 64).bfloat16()
    is_for = kind.module.is_for
    assert is_for(x, layer, routing, GLU)
    assert not is_for(x, layer, routing, RELU_SQUARED)
    assert not is_for(x.half(), layer, routing, GLU)
    assert not is_for(x.float(), layer, routing, GLU)
    assert not is_for(torch.zeros(200).bfloat16()[4:-4].view(3, 64), layer, routing, GLU)
    assert not is_for(x, layer, make_routing(3, 32 if kind is PLAIN else 128), GLU)
    assert not is_for(x, layer._replace(matrix=torch.zeros(640, 64)), routing, GLU)
    assert not is_for(x, kind.make_layer(96, 64), routing, None)
    assert not is_for(x, kind.make_layer(128, 96), routing, None)
    if kind is PLAIN:
        assert not is_for(x, layer, make_routing(few_rows_experts.MOST_ROWS + 1, 16), GLU)


# Rows, the size of tiles, how many of these have no expert.
TILES = [(1, 16, 2), (8, 16, 2), (8, 16, 500), (60, 16, 2)]


@on_gpu
@pytest.mark.parametrize(
    ("kind", "num_ins", "tiles"),
    [
        (PLAIN, (64, 320, 2048), TILES),
        (MXFP4, (256, 320, 2880), [*TILES, (60, 32, 2), (200, 64, 2)]),
    ],
)
@pytest.mark.parametrize("which", range(3))
def test_rows_have_the_bits_of_the_kernel_for_any_gpu(
    kind: Kind, num_ins: tuple[int, ...], tiles: list[tuple[int, int, int]], which: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In tiles of any size, in few and in many, and alone."""
    num_in = num_ins[which]
    first, down = kind.make_layer(704, num_in), kind.make_layer(320, num_in)
    outs, tilings = [], []
    tiling_of = mxfp4_few_rows._tiling

    def noted(*args: Any) -> mxfp4_few_rows._Tiling:
        tilings.append(tiling_of(*args))
        return tilings[-1]

    monkeypatch.setattr(mxfp4_few_rows, "_tiling", noted)
    for num_rows, size, num_empty in tiles:
        few = make_routing(num_rows, size, num_empty)
        x = normals(1)(200, num_in).bfloat16()[:num_rows]
        pairs = normals(2)(200 * TOP_K, num_in).bfloat16()[: num_rows * TOP_K]
        ours = kind.activations(x, few, first), kind.parts(pairs, few, down)
        with monkeypatch.context() as changed:
            changed.setattr(kind.module, "is_for", lambda *_: False)
            for_any = experts_product(x, few, first, GLU), experts_product(pairs, few, down, None)
        for one, other in zip(ours, for_any, strict=True):
            assert torch.equal(one, other)
        outs.append((ours[0][:TOP_K], ours[1][:, :1]))
    assert all(torch.equal(a[i], b[i]) for a, b in pairwise(outs) for i in range(2))
    assert kind is PLAIN or set(tilings) == {(1, 3), (1, 4), (2, 2)}

"""Gated delta nets and Mamba2: kernel and reference agree, and any way through rows gives the same
bits.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from block_scaled import Broken
from random_tensors import normals
from verification import DEVICE, HAS_KERNELS

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model import state_layer, state_trial, state_warpgroups
from outrider.kernels.model.delta_net import delta_net, delta_net_reference
from outrider.kernels.model.gated_norm import gated_norm, gated_norm_reference
from outrider.kernels.model.mamba2 import mamba2, mamba2_reference
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.rows import BatchRows
from outrider.kernels.model.state_cells import CELL
from outrider.kernels.model.state_layer import StateHeads, StateMemory, StateWeights
from outrider.kernels.model.warpgroups import has_warpgroups
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    from gluon_interpreter import Kernel

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
needs_warpgroups = pytest.mark.skipif(
    not HAS_GLUON or not (INTERPRET or has_warpgroups(DEVICE)), reason="needs a Hopper GPU"
)
HEADS = StateHeads(2, 4, key_dim=12, value_dim=8, num_scalars=2)
SMALL = StateHeads(1, 2, key_dim=12, value_dim=8, num_scalars=2)
WIDE = StateHeads(1, 2, key_dim=16, value_dim=40, num_scalars=2)
WARPGROUPS = StateHeads(1, 2, key_dim=64, value_dim=128, num_scalars=2)
TAPS, NUM_SLOTS, MAX_DRAFTS = 4, 4, 3
Rows = tuple[int, int, int]  # of a sequence: its slot, its first row, how many
Implementation = Callable[..., torch.Tensor]


def of_mamba2(heads: StateHeads) -> StateHeads:
    return heads._replace(num_scalars=1)


def weights_of(heads: StateHeads, dtype: torch.dtype = torch.float32) -> StateWeights:
    randn = normals(1)
    convolution = randn(heads.num_channels, TAPS).to(dtype)
    # Some heads forget within a few tokens, others hardly ever.
    dt_bias = torch.linspace(-12, 3, heads.num_value_heads, device=DEVICE)
    weights = StateWeights(convolution, randn(heads.num_value_heads), dt_bias)
    if heads.num_scalars == 2:
        return weights
    bias, skip = randn(heads.num_channels).to(dtype), randn(heads.num_value_heads)
    return weights._replace(bias=bias, skip=skip)


def empty_memory(heads: StateHeads, dtype: torch.dtype = torch.float32) -> StateMemory:
    """As others leave it."""
    ring = NUM_SLOTS, TAPS - 1 + MAX_DRAFTS + CELL - 1, heads.row_width
    state = NUM_SLOTS, heads.num_value_heads, heads.key_dim, heads.value_dim
    return StateMemory(
        torch.full(state, torch.nan, device=DEVICE),
        torch.full(ring, torch.nan, device=DEVICE, dtype=dtype),
        torch.full((NUM_SLOTS,), 77, device=DEVICE),
    )


def rows_of(batch: Sequence[Rows], num_padding: int = 0) -> BatchRows:
    lens = [count for *_, count in batch]
    slots = [slot for slot, *_ in batch] + [NUM_SLOTS - 1] * num_padding
    seq_lens = [first + count for _, first, count in batch] + [0] * num_padding
    bounds = [0, *accumulate(lens)] + [sum(lens)] * num_padding
    unused = torch.empty(0, dtype=torch.int64, device=DEVICE)
    given = (
        torch.tensor(each, dtype=torch.int64, device=DEVICE) for each in (slots, seq_lens, bounds)
    )
    return BatchRows(unused, unused, unused, *given)


def run(
    implementation: Implementation,
    x: torch.Tensor,
    batch: Sequence[Rows],
    known: dict[int, int],
    memory: StateMemory,
    heads: StateHeads = HEADS,
    num_padding: int = 0,
) -> list[torch.Tensor]:
    """The outputs of each sequence's rows; x: [NUM_SLOTS, length, row_width]."""
    parts = [x[slot, first : first + count] for slot, first, count in batch]
    rows = torch.cat([*parts, x.new_full((num_padding, x.shape[2]), torch.nan)])
    num_tokens = torch.tensor([known.get(i, 0) for i in range(NUM_SLOTS)], device=DEVICE)
    weights = weights_of(heads, x.dtype)
    given = rows_of(batch, num_padding)
    channels, scalars = rows.tensor_split([heads.num_channels], 1)
    scalars = scalars.clone()  # its rows lie closer together
    out = implementation(channels, scalars, heads, weights, memory, given, num_tokens)
    return list(out[: len(rows) - num_padding].split([count for *_, count in batch]))


@pytest.fixture(
    params=[
        pytest.param(delta_net_reference, id="reference"),
        pytest.param(delta_net, marks=needs_kernels, id="kernels"),
    ]
)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    chosen: Implementation = request.param
    return chosen


@needs_kernels
@pytest.mark.parametrize("is_mamba2", [False, True])
@pytest.mark.parametrize(("heads", "dtype"), [(HEADS, torch.float32), (WIDE, torch.bfloat16)])
def test_kernel_equals_reference(heads: StateHeads, dtype: torch.dtype, is_mamba2: bool) -> None:
    both: tuple[Implementation, ...] = delta_net, delta_net_reference
    if is_mamba2:
        heads, both = of_mamba2(heads), (mamba2, mamba2_reference)
    x = normals(2, dtype)(NUM_SLOTS, 18, heads.row_width)
    results = []
    for each in both:
        memory, outs = empty_memory(heads, dtype), []
        steps: list[tuple[list[Rows], dict[int, int]]] = [
            ([(0, 0, 5), (2, 0, 12)], {0: 5, 2: 12}),
            ([(2, 12, 4), (0, 5, 1)], {2: 13, 0: 6}),
            ([(2, 15, 1), (0, 6, 12)], {2: 16, 0: 16}),  # two of three drafts were accepted
        ]
        for batch, known in steps:
            outs += run(each, x, batch, known, memory, heads, num_padding=2)
        results.append([*outs, memory.state[::2], memory.num_rows])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    for got, expected in zip(*results, strict=True):
        # Keys of Mamba2 are not normalised: large parts of a sum may cancel each other.
        atol = tolerance * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=atol)


@pytest.mark.parametrize(
    ("implementation", "seed", "length", "dtype"),
    [
        pytest.param(delta_net_reference, 0, 36, torch.float32, id="reference"),
        pytest.param(delta_net_reference, 1, 36, torch.float32, id="reference-1"),
        pytest.param(delta_net, 0, 36, torch.float32, marks=needs_kernels, id="kernels"),
        pytest.param(
            delta_net, 1, 36, torch.bfloat16, marks=[needs_kernels, pytest.mark.sweep], id="16-bits"
        ),
        pytest.param(mamba2_reference, 0, 36, torch.float32, id="mamba2-reference"),
        pytest.param(mamba2, 0, 36, torch.float32, marks=needs_kernels, id="mamba2-kernels"),
        pytest.param(
            mamba2,
            3,
            36,
            torch.bfloat16,
            marks=[needs_kernels, pytest.mark.sweep],
            id="mamba2-16-bits",
        ),
    ],
)
def test_any_way_through_the_rows_gives_the_same_bits(
    implementation: Implementation, seed: int, length: int, dtype: torch.dtype
) -> None:
    """In chunks of any size, in any company, behind any number of accepted and rejected drafts."""
    rng, heads = random.Random(seed), SMALL
    if implementation in (mamba2, mamba2_reference):
        heads = of_mamba2(heads)
    x = normals(seed, dtype)(NUM_SLOTS, length, heads.row_width)
    alone = [
        run(
            implementation,
            x,
            [(slot, 0, length)],
            {slot: length},
            empty_memory(heads, dtype),
            heads,
        )[0]
        for slot in range(2)
    ]
    memory, done, accepted = empty_memory(heads, dtype), {0: 0, 1: 0}, set()
    while min(done.values()) < length:
        batch, known, drafts = [], {}, x.clone()
        for slot in rng.sample([0, 1], rng.choice([1, 2, 2])):
            first = done[slot]
            num_known = min(rng.choice([1, 1, 1, 2, 7]), length - first)
            num_drafts = min(rng.choice([0, 1, 3, 3, 3]), length - first - num_known)
            num_right = rng.randint(0, num_drafts)
            wrong = slice(first + num_known + num_right, first + num_known + num_drafts)
            drafts[slot, wrong] = 1e4  # nothing of them may be left
            batch.append((slot, first, num_known + num_drafts))
            known[slot] = first + num_known
            done[slot] = first + num_known + num_right
            accepted.add(num_right)
        batch = [rows for rows in batch if rows[2]]
        outs = run(implementation, drafts, batch, known, memory, heads)
        for (slot, first, _), out in zip(batch, outs, strict=True):
            assert torch.equal(out[: done[slot] - first], alone[slot][first : done[slot]])
    assert accepted == {0, 1, 2, 3}


def test_a_slot_forgets_the_sequence_before(implementation: Implementation) -> None:
    x = normals(5)(NUM_SLOTS, 6, HEADS.row_width)
    memory = empty_memory(HEADS)
    first = run(implementation, x, [(0, 0, 6)], {0: 4}, memory)
    memory.state.fill_(torch.nan)
    again = run(implementation, x, [(0, 0, 6)], {0: 4}, memory)
    assert torch.equal(again[0], first[0])


@needs_kernels
@pytest.mark.parametrize("is_mamba2", [False, True])
def test_prompts_are_prepared_more_rows_at_a_time_with_the_same_bits(
    is_mamba2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = of_mamba2(SMALL) if is_mamba2 else SMALL
    x = normals(6)(NUM_SLOTS, 50, heads.row_width)
    results = []
    for few in (0, 1000):
        monkeypatch.setattr(state_layer, "_FEW_ROWS", few)
        memory, outs = empty_memory(heads), []
        for batch, known in (
            ([(2, 0, 37), (0, 0, 33)], {2: 36, 0: 33}),  # some rows are not covered by a state
            ([(0, 33, 9), (2, 36, 14)], {0: 42, 2: 50}),
        ):
            layer = mamba2 if is_mamba2 else delta_net
            outs += run(layer, x, batch, known, memory, heads)
        results.append([*outs, memory.state[::2], memory.num_rows])
    for several, one in zip(*results, strict=True):
        assert torch.equal(several, one)


@needs_kernels
def test_kernels_go_on_from_where_a_reference_stopped() -> None:
    """Inside a cell, as the comparison at load does, and they go on from what they keep."""
    x, outs = normals(8)(NUM_SLOTS, 45, HEADS.row_width), []
    for first_of_kernels in (5, 45):
        memory, got = empty_memory(HEADS), []
        for first, count in [(0, 5), (5, 26), (31, 14)]:
            each = delta_net if first >= first_of_kernels else delta_net_reference
            got += run(each, x, [(1, first, count)], {1: first + count}, memory)
        outs.append(torch.cat(got))
        assert int(memory.num_rows[1]) == (37 if first_of_kernels == 5 else 45)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """As on a Hopper GPU; with stand-ins that a CPU runs for the kernel by warpgroups."""
    failed: set[torch.device] = set()
    for place in (state_warpgroups, state_trial):
        monkeypatch.setattr(place, "failed", failed)
    made = []
    if DEVICE.type == "cpu":
        made.append(Kernel(None, name="_cell_by_cell_kernel"))
        monkeypatch.setattr(state_warpgroups, "_cell_by_cell_kernel", made[0])
        monkeypatch.setattr(state_warpgroups, "has_warpgroups", lambda _: True)
    state_trial.try_cells.cache_clear()
    yield made
    state_trial.try_cells.cache_clear()


def through_steps(layer: Implementation, heads: StateHeads) -> list[torch.Tensor]:
    """What drafts, chunks and edges of cells give, and the states behind them."""
    x = normals(9, torch.bfloat16)(NUM_SLOTS, 70, heads.row_width)
    memory, outs = empty_memory(heads, torch.bfloat16), []
    steps: list[tuple[list[Rows], dict[int, int]]] = [
        ([(0, 0, 5), (2, 0, 46)], {0: 5, 2: 46}),
        ([(2, 46, 4), (0, 5, 50)], {2: 47, 0: 55}),  # drafts behind the edge of a cell
        ([(2, 49, 2), (0, 55, 12)], {2: 50, 0: 64}),  # two of three drafts were accepted
    ]
    for batch, known in steps:
        outs += run(layer, x, batch, known, memory, heads, num_padding=2)
    return [*outs, memory.state[::2], memory.num_rows]


@needs_warpgroups
@pytest.mark.parametrize("is_mamba2", [False, True])
def test_warpgroups_pass_rows_as_other_kernels_do(
    is_mamba2: bool, on_hopper: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, layer, reference = WARPGROUPS, delta_net, delta_net_reference
    if is_mamba2:
        heads, layer, reference = of_mamba2(heads), mamba2, mamba2_reference
    ours = through_steps(layer, heads)
    assert all(kernel.num_launches == 3 for kernel in on_hopper)
    monkeypatch.setattr(state_warpgroups, "has_warpgroups", lambda _: False)
    others, expected = through_steps(layer, heads), through_steps(reference, heads)
    for got, other, exact in zip(ours, others, expected, strict=True):
        if DEVICE.type == "cuda":
            assert torch.equal(got, other)
        rtol = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, other, rtol=rtol, atol=1e-4)
        if got.dtype == torch.bfloat16:  # the reference's states cover all known rows
            atol = 4e-2 * max(1.0, float(exact.abs().max()))
            torch.testing.assert_close(got, exact, rtol=4e-2, atol=atol)


@needs_warpgroups
def test_any_chunks_by_warpgroups_give_the_same_bits(on_hopper: list[Any]) -> None:
    heads, dtype = WARPGROUPS, torch.bfloat16
    x = normals(10, dtype)(NUM_SLOTS, 50, heads.row_width)
    whole = run(delta_net, x, [(1, 0, 50)], {1: 50}, empty_memory(heads, dtype), heads)[0]
    for chunks in ([17, 1, 32], [16, 16, 18], [3, 40, 7]):
        memory, done = empty_memory(heads, dtype), 0
        for count in chunks:
            batch = [(0, done, count), (1, done, count)]
            known = {0: done + count, 1: done + count}
            out = run(delta_net, x, batch, known, memory, heads)[1]
            assert torch.equal(out, whole[done : done + count])
            done += count


@needs_warpgroups
@pytest.mark.parametrize("num_scalars", [1, 2])
def test_warpgroups_that_work_are_used(
    num_scalars: int, on_hopper: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    heads = WARPGROUPS._replace(num_scalars=num_scalars)
    for each in (heads, heads, heads._replace(key_dim=96)):  # for which it is not: not tried
        state_trial.try_cells(each, torch.bfloat16, DEVICE)
    state_trial.try_cells(heads, torch.float32, DEVICE)
    assert all(kernel.num_launches == 1 for kernel in on_hopper)
    assert state_warpgroups.is_for(torch.bfloat16, 64, 128, DEVICE)
    assert not caplog.records


class Wrong:
    """Leaves something out."""

    def __init__(self, number: float, *, of_state: bool) -> None:
        self._number, self._of_state = number, of_state
        self._kernel = Kernel(None, name="_cell_by_cell_kernel")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(out: torch.Tensor, *given: Any, **options: Any) -> None:
            self._kernel[grid](out, *given, **options)
            changed = given[3] if self._of_state else out
            changed.view(-1)[5] = self._number

        return launch


@needs_warpgroups
@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs")
@pytest.mark.parametrize(
    ("make_kernel", "reason"),
    [
        (Broken, "RuntimeError: Cannot find ptxas)"),
        (lambda: Wrong(30.0, of_state=False), "wrong by"),
        (lambda: Wrong(30.0, of_state=True), "wrong by"),
        (lambda: Wrong(torch.nan, of_state=True), "wrong by nan"),
    ],
)
def test_warpgroups_that_fail_leave_rows_to_other_kernels_with_one_warning(
    make_kernel: Callable[[], Any],
    reason: str,
    on_hopper: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(state_warpgroups, "_cell_by_cell_kernel", make_kernel())
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        state_trial.try_cells(WARPGROUPS, dtype, DEVICE)
    assert not state_warpgroups.is_for(torch.bfloat16, 64, 128, DEVICE)
    assert [reason in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gates_first", [False, True])
def test_the_gated_norm_is_its_formula(gates_first: bool, dtype: torch.dtype) -> None:
    """With weights for all heads, or its own for each."""
    randn = normals(6, dtype)
    x, gate = randn(5, 3, 12), randn(5, 40)[:, 4:]
    norm = Norm(normals(7)(3, 12) if gates_first else normals(7)(12), 1e-6)
    factor, wide = torch.nn.functional.silu(gate.double()).view(5, 3, 12), x.double()
    if gates_first:
        wide *= factor
    expected = wide * torch.rsqrt(wide.square().mean(2, keepdim=True) + 1e-6) * norm.weight
    if not gates_first:
        expected *= factor
    for each in (gated_norm, gated_norm_reference):
        got = each(x, norm, gate, gates_first=gates_first).double()
        rtol = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(got, expected.flatten(1), rtol=rtol, atol=1e-5)

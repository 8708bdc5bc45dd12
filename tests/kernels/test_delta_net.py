"""Gated delta nets: kernel and reference agree, and any way through rows gives the same bits."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from random_tensors import normals
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model.delta_cells import CELL
from outrider.kernels.model.delta_net import (
    DeltaHeads,
    DeltaMemory,
    DeltaWeights,
    delta_net,
    delta_net_reference,
)
from outrider.kernels.model.gated_norm import gated_norm, gated_norm_reference
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.rows import BatchRows

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
HEADS = DeltaHeads(num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=8)
SMALL = DeltaHeads(num_key_heads=1, num_value_heads=2, key_dim=12, value_dim=8)
WIDE = DeltaHeads(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=40)
TAPS, NUM_SLOTS, MAX_DRAFTS = 4, 4, 3
Rows = tuple[int, int, int]  # of a sequence: its slot, its first row, how many
Implementation = Callable[..., torch.Tensor]


def weights_of(heads: DeltaHeads, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    randn = normals(1)
    convolution = randn(heads.num_channels, TAPS).to(dtype)
    # Some heads forget within a few tokens, others hardly ever.
    dt_bias = torch.linspace(-12, 3, heads.num_value_heads, device=DEVICE)
    return DeltaWeights(convolution, randn(heads.num_value_heads), dt_bias)


def empty_memory(heads: DeltaHeads, dtype: torch.dtype = torch.float32) -> DeltaMemory:
    """As others leave it."""
    ring = NUM_SLOTS, TAPS - 1 + MAX_DRAFTS + CELL - 1, heads.row_width
    state = NUM_SLOTS, heads.num_value_heads, heads.key_dim, heads.value_dim
    return DeltaMemory(
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
    memory: DeltaMemory,
    heads: DeltaHeads = HEADS,
    num_padding: int = 0,
) -> list[torch.Tensor]:
    """The outputs of each sequence's rows; x: [NUM_SLOTS, length, row_width]."""
    parts = [x[slot, first : first + count] for slot, first, count in batch]
    rows = torch.cat([*parts, x.new_full((num_padding, x.shape[2]), torch.nan)])
    num_tokens = torch.tensor([known.get(i, 0) for i in range(NUM_SLOTS)], device=DEVICE)
    weights = weights_of(heads, x.dtype)
    given = rows_of(batch, num_padding)
    out = implementation(rows, heads, weights, memory, given, num_tokens)
    assert not out[len(rows) - num_padding :].any()
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
@pytest.mark.parametrize(("heads", "dtype"), [(HEADS, torch.float32), (WIDE, torch.bfloat16)])
def test_kernel_equals_reference(heads: DeltaHeads, dtype: torch.dtype) -> None:
    x = normals(2, dtype)(NUM_SLOTS, 18, heads.row_width)
    results = []
    for each in (delta_net, delta_net_reference):
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
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("implementation", "seed", "length", "dtype"),
    [
        pytest.param(delta_net_reference, 0, 36, torch.float32, id="reference"),
        pytest.param(delta_net_reference, 1, 36, torch.float32, id="reference-1"),
        pytest.param(delta_net, 0, 36, torch.float32, marks=needs_kernels, id="kernels"),
        pytest.param(
            delta_net, 1, 36, torch.bfloat16, marks=[needs_kernels, pytest.mark.sweep], id="16-bits"
        ),
    ],
)
def test_any_way_through_the_rows_gives_the_same_bits(
    implementation: Implementation, seed: int, length: int, dtype: torch.dtype
) -> None:
    """In chunks of any size, in any company, behind any number of accepted and rejected drafts."""
    rng = random.Random(seed)
    x = normals(seed, dtype)(NUM_SLOTS, length, SMALL.row_width)
    alone = [
        run(
            implementation,
            x,
            [(slot, 0, length)],
            {slot: length},
            empty_memory(SMALL, dtype),
            SMALL,
        )[0]
        for slot in range(2)
    ]
    memory, done, accepted = empty_memory(SMALL, dtype), {0: 0, 1: 0}, set()
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
        outs = run(implementation, drafts, batch, known, memory, SMALL)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_norm_is_its_formula(dtype: torch.dtype) -> None:
    randn = normals(6, dtype)
    x, gate, norm = randn(5, 3, 12), randn(5, 40)[:, 4:], Norm(normals(7)(12), 1e-6)
    scale = torch.rsqrt(x.double().square().mean(2, keepdim=True) + 1e-6)
    expected = (x * scale * norm.weight).flatten(1) * torch.nn.functional.silu(gate.double())
    for each in (gated_norm, gated_norm_reference):
        rtol = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(each(x, norm, gate).double(), expected, rtol=rtol, atol=1e-5)

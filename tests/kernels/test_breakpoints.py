"""Proof 2: the code against the exact rules, just either side of every breakpoint.

The outcome of a step is piecewise constant in its uniforms. Injecting uniforms on both sides of
every acceptance threshold and of every edge of the last token's distribution visits every cell, so
that agreement everywhere makes the code's distribution the rules' own, up to float margins.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, product
from typing import NamedTuple

import pytest
import torch
from exact_rules import Step, random_model, settle, step_along, thresholds_of
from verification import (
    DEVICE,
    cu_rows_of,
    draw_draft,
    logits_of,
    make_sampling,
    on_road,
    sides_of,
    verify,
    word_of,
    words40_of,
)

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.verify.sampling import BLOCK, Rule

RULES = {"token": Rule.TOKEN, "block": Rule.BLOCK}


class Cell(NamedTuple):
    step: Step
    uniforms: tuple[float, ...]
    last_u: float
    expected: list[int]


def cells_of(rule: str, step: Step) -> Iterator[Cell]:
    """Every combination of passing and failing tests, and every cell of the last token's CDF."""
    thresholds = thresholds_of(rule, step)
    sides = [sides_of([float(h)]) for h in thresholds]
    for uniforms in product(*sides):
        passed = tuple(u <= float(h) for u, h in zip(uniforms, thresholds, strict=True))
        tau, last = settle(rule, step, passed)
        edges = [float(edge) for edge in accumulate(last)]
        for last_u in sides_of(edges[:-1]):
            token = next(i for i, edge in enumerate(edges) if last_u < edge)
            yield Cell(step, uniforms, last_u, [*step.drafts[:tau], token])


def run_cells(rule: str, cells: list[Cell], road: str, one_hot: bool = False) -> list[list[int]]:
    k, batch = len(cells[0].step.drafts), len(cells)
    vocab = len(cells[0].step.p[0])
    # Logits of half the size at half the temperature: the same distributions.
    target = torch.stack([logits_of(row) / 2 for cell in cells for row in cell.step.p]).to(DEVICE)
    drafts = torch.tensor([cell.step.drafts for cell in cells], device=DEVICE).view(batch, k)
    words = torch.zeros(batch, k + 2, 4, dtype=torch.int64)
    for i, cell in enumerate(cells):
        for j, u in enumerate(cell.uniforms):
            words[i, j, 0] = word_of(u)
        words[i, k + 1, 2], words[i, k + 1, 3] = words40_of(cell.last_u)
    sampling = make_sampling(batch, temperature=0.5, rule=RULES[rule])
    positions = torch.full((batch,), 5, device=DEVICE)
    with on_road(road):
        draft = state = None
        if not one_hot and k:
            rows = [torch.stack([logits_of(row) / 2 for row in cell.step.q]) for cell in cells]
            draft = torch.stack(rows).to(DEVICE)
            states = [
                draw_draft(draft[:, j], sampling, positions, positions, vocab).state
                for j in range(k)
            ]
            state = torch.stack(states, 1)
        num_drafts = torch.full((batch,), k, dtype=torch.int32, device=DEVICE)
        verified = verify(
            target, cu_rows_of(num_drafts), drafts, num_drafts, draft, state, sampling, positions,
            vocab, words=words.to(DEVICE),
        )  # fmt: skip
    assert not verified.is_bad.any()
    pairs = zip(verified.token_ids.tolist(), verified.num_tokens.tolist(), strict=True)
    return [tokens[:n] for tokens, n in pairs]


def drawn_paths(vocab: int, k: int, seed: int, zeros: bool) -> Iterator[Step]:
    target, draft = random_model(seed, vocab, zeros), random_model(seed + 100, vocab, zeros)
    for path in product(range(vocab), repeat=k):
        step = step_along(target, draft, path)
        if all(step.q[i][x] for i, x in enumerate(path)):
            yield step


# Under the interpreter a cell takes a fifth of a second: some there, and on the other roads all.
INTERPRETED = [8, pytest.param(30, marks=pytest.mark.sweep)] if INTERPRET else [0]


@pytest.mark.parametrize("interpreted", INTERPRETED)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("vocab", "k", "zeros"), [(2, 1, False), (3, 2, True), (2, 3, False)])
def test_every_cell_has_the_exact_outcome(
    rule: str, vocab: int, k: int, zeros: bool, road: str, interpreted: int
) -> None:
    seeds = range(2 if road == "reference" else 1)
    steps = [step for seed in seeds for step in drawn_paths(vocab, k, seed, zeros)]
    cells = [cell for step in steps for cell in cells_of(rule, step)]
    if road == "kernel" and INTERPRET:
        cells = cells[:: max(1, len(cells) // interpreted)]
    outcomes = run_cells(rule, cells, road)
    wrong = [(c, o) for c, o in zip(cells, outcomes, strict=True) if o != c.expected]
    assert not wrong, f"{len(wrong)} of {len(cells)} cells, the first: {wrong[0]}"


def test_block_goes_on_after_a_test_that_failed(road: str) -> None:
    """A draft after a failed one can still pass, and takes the failed one with it."""
    found = []
    for seed in range(6):
        for step in drawn_paths(2, 3, seed, False):
            thresholds = [float(h) for h in thresholds_of("block", step)]
            for cell in cells_of("block", step):
                failed = [u > h for u, h in zip(cell.uniforms, thresholds, strict=True)]
                accepted = len(cell.expected) - 1
                if 0 < accepted < 3 and any(failed[:accepted]):
                    found.append(cell)
    cells = found[:: max(1, len(found) // 12)]
    assert len(cells) >= 6
    assert run_cells("block", cells, road) == [cell.expected for cell in cells]


def test_one_hot_drafts_are_a_draft_distribution_of_one_token(road: str) -> None:
    vocab, k = 3, 2
    target = random_model(7, vocab)
    cells = []
    for path in product(range(vocab), repeat=k):
        step = step_along(target, target, path)
        one_hot = [[Fraction(int(x == y)) for y in range(vocab)] for x in path]
        cells += cells_of("block", step._replace(q=one_hot))
    if road == "kernel" and INTERPRET:
        cells = cells[::18]
    assert run_cells("block", cells, road, one_hot=True) == [cell.expected for cell in cells]


def test_plain_draw_follows_the_cdf_over_blocks(road: str) -> None:
    """The last draw's first words choose a block, its last a token inside it."""
    vocab = 2 * BLOCK + 3
    logits = torch.full((1, vocab), -torch.inf)
    chances = {5: 0.125, BLOCK - 1: 0.25, BLOCK: 0.125, BLOCK + 700: 0.25, 2 * BLOCK + 2: 0.25}
    for token, chance in chances.items():
        logits[0, token] = float(torch.tensor(chance).log())
    cases = [
        (0.374, 0.332, 5), (0.374, 0.334, BLOCK - 1), (0.376, 0.332, BLOCK),
        (0.376, 0.334, BLOCK + 700), (0.749, 0.999, BLOCK + 700), (0.751, 0.001, 2 * BLOCK + 2),
    ]  # fmt: skip
    words = torch.zeros(len(cases), 2, 4, dtype=torch.int64)
    for i, (block_u, token_u, _) in enumerate(cases):
        words[i, 1] = torch.tensor([*words40_of(block_u), *words40_of(token_u)])
    batch = len(cases)
    none = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    with on_road(road):
        verified = verify(
            logits.expand(batch, -1).contiguous().to(DEVICE), cu_rows_of(none),
            torch.zeros(batch, 0, dtype=torch.int64, device=DEVICE), none, None, None,
            make_sampling(batch), torch.zeros(batch, dtype=torch.int64, device=DEVICE), vocab,
            words=words.to(DEVICE),
        )  # fmt: skip
    assert verified.token_ids[:, 0].tolist() == [token for _, _, token in cases]


def test_recovered_token_comes_from_the_residual_over_blocks(road: str) -> None:
    """p and q differ in three blocks; where q covers p nothing is ever recovered."""
    vocab = 3 * BLOCK
    p, q = torch.zeros(vocab), torch.zeros(vocab)
    p[[3, BLOCK + 1, 2 * BLOCK + 9]] = torch.tensor([0.5, 0.25, 0.25])
    q[[3, BLOCK + 1, 2 * BLOCK + 9]] = torch.tensor([0.75, 0.125, 0.125])
    # The draft is 3, accepted while u <= 2/3; the residual is half each of the other two.
    cases = [(0.66, 0.1, 3), (0.67, 0.499, BLOCK + 1), (0.67, 0.501, 2 * BLOCK + 9)]
    batch = len(cases)
    words = torch.zeros(batch, 3, 4, dtype=torch.int64)
    for i, (accept_u, block_u, _) in enumerate(cases):
        words[i, 0, 0] = word_of(accept_u)
        words[i, 2] = torch.tensor([*words40_of(block_u), 0, 0])
    one = torch.ones(batch, dtype=torch.int32, device=DEVICE)
    sampling = make_sampling(batch)
    positions = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    draft = q.log().expand(batch, 1, -1).contiguous().to(DEVICE)
    with on_road(road):
        state = draw_draft(draft[:, 0], sampling, positions, positions, vocab).state[:, None]
        verified = verify(
            p.log().expand(2 * batch, -1).contiguous().to(DEVICE), cu_rows_of(one),
            torch.full((batch, 1), 3, device=DEVICE), one, draft, state.contiguous(), sampling,
            positions, vocab, words=words.to(DEVICE),
        )  # fmt: skip
    assert verified.token_ids[:, 0].tolist() == [token for _, _, token in cases]

"""Top-k, top-p and min-p against their definitions, written out over a sorted row."""

import pytest
import torch
from grids import pairwise
from verification import DEVICE, DRAWING_ROADS, draw_draft, make_sampling, on_road

from outrider.kernels.verify.sampling import Sampling, log_prob_reference


def kept_by_definition(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    if 0 < top_k < len(row):
        order = order[:top_k]
    p = torch.softmax(row[order].double() / temperature, 0)
    kept, before = set(), 0.0
    for rank, token in enumerate(order):
        is_first = rank == 0
        if (top_p >= 1 or before < top_p or is_first) and (
            float(p[rank]) >= min_p * float(p[0]) or is_first
        ):
            kept.add(token)
        before += float(p[rank])
    return kept


def kept_by_state(row: torch.Tensor, state: torch.Tensor) -> set[int]:
    ids = torch.arange(len(row))
    log_p = log_prob_reference(row[None].float(), ids, state[None].cpu(), torch.ones(1))
    return set(ids[log_p[0] > -torch.inf].tolist())


def states(logits: torch.Tensor, sampling: Sampling, road: str, vocab: int) -> torch.Tensor:
    positions = torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
    with on_road(road):
        return draw_draft(logits.to(DEVICE), sampling, positions, positions, vocab).state


CASES = [
    (0, 0.9, 0.0), (0, 0.3, 0.0), (0, 0.0, 0.0), (5, 1.0, 0.0), (1, 1.0, 0.0), (50, 0.95, 0.0),
    (0, 1.0, 0.1), (0, 1.0, 1.0), (20, 0.8, 0.05), (70, 0.99, 0.0), (0, 0.999, 0.001),
]  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "dtype", "road"),
    pairwise(
        [2, 5, 100, 1024, 1025, 5000], [torch.float32, torch.float16, torch.bfloat16], DRAWING_ROADS
    ),
)
def test_filters_keep_what_their_definition_keeps(
    vocab: int, dtype: torch.dtype, road: str
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    cases = CASES if road == "reference" or DEVICE.type == "cuda" else CASES[::3]
    for spread in (1.0, 6.0):
        logits = (torch.randn(len(cases), vocab, generator=generator) * spread).to(dtype)
        parts = [make_sampling(1, 0.8, k, p, m) for k, p, m in cases]
        sampling = Sampling(*(torch.cat(fields) for fields in zip(*parts, strict=True)))
        found = states(logits, sampling, road, vocab)
        for row, state, (k, p, m) in zip(logits, found, cases, strict=True):
            assert kept_by_state(row, state) == kept_by_definition(row, 0.8, k, p, m), (k, p, m)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (700, 1.0), (0, 0.25), (0, 0.75)])
def test_ties_at_the_boundary_go_to_the_lowest_ids(top_k: int, top_p: float, road: str) -> None:
    vocab = 1200
    logits = torch.zeros(1, vocab)
    logits[0, 900] = 1e-6  # the only one above the tie
    state = states(logits, make_sampling(1, top_k=top_k, top_p=top_p), road, vocab)
    size = top_k or int(top_p * vocab)
    assert kept_by_state(logits[0], state[0]) == {900} | set(range(size - 1))


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6)])
def test_ties_of_a_few_candidates_go_to_the_lowest_ids(top_k: int, top_p: float, road: str) -> None:
    logits = torch.full((1, 100), -20.0)
    logits[0, [40, 5, 95, 70, 71]] = 0.0
    logits[0, 90] = 1.0
    state = states(logits, make_sampling(1, top_k=top_k, top_p=top_p), road, 100)
    assert kept_by_state(logits[0], state[0]) == {90, 5, 40}


def test_a_nucleus_of_many_thousands_is_exact(road: str) -> None:
    generator = torch.Generator().manual_seed(1)
    vocab = 8193
    logits = torch.randn(1, vocab, generator=generator) * 0.5
    state = states(logits, make_sampling(1, top_p=0.9), road, vocab)
    truth = kept_by_definition(logits[0], 1.0, 0, 0.9, 0.0)
    assert len(truth) > 5000
    # One token at the very edge may go either way by float32's rounding of the row's sum.
    assert len(kept_by_state(logits[0], state[0]) ^ truth) <= 1


def test_top_k_of_thousands_is_what_top_p_takes_its_share_of() -> None:
    vocab = 5000
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(3)) * 0.5
    state = states(logits, make_sampling(2, top_k=3000, top_p=0.3), "reference", vocab)
    truth = kept_by_definition(logits[0], 1.0, 3000, 0.3, 0.0)
    assert len(kept_by_state(logits[0], state[0]) ^ truth) <= 1


def test_normaliser_is_that_of_the_kept_tokens(road: str) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, 3000, generator=generator) * 4
    state = states(logits, make_sampling(1, top_k=30, top_p=0.9), road, 3000)[0].cpu()
    log_p = log_prob_reference(logits, torch.arange(3000), state[None], torch.ones(1))
    assert float(log_p.exp().sum()) == pytest.approx(1.0, abs=1e-6)


def test_temperature_comes_before_the_filters(road: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    hot = states(logits, make_sampling(1, temperature=4.0, top_p=0.6), road, 3)
    cold = states(logits, make_sampling(1, temperature=0.5, top_p=0.6), road, 3)
    assert kept_by_state(logits[0], hot[0]) == {0, 1}
    assert kept_by_state(logits[0], cold[0]) == {0}

"""Sampled requests of a CPU in one compiled call, against the references."""

from collections.abc import Callable

import pytest
import torch
from verification import (
    DRAWING_ROADS,
    Batch,
    equal,
    make_sampling,
    mixed_sampling,
    on_road,
)

from outrider.kernels.verify import sampled
from outrider.kernels.verify.sampling import STATE_LOG_Z, STATE_THRESHOLD, Rule
from outrider.kernels.verify.verify import draft_sample

pytestmark = pytest.mark.skipif("compiled" not in DRAWING_ROADS, reason="nothing was compiled here")
DTYPES = [torch.float32, torch.bfloat16]


def check(batch: Batch) -> None:
    for one_hot in (False, True):
        ours, truth = batch.verify("compiled", one_hot), batch.verify("reference", one_hot)
        assert equal(ours, truth), (ours, truth, batch.sampling)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 97, 1025, 5000])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batch(dtype: torch.dtype, vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_drafts = [3, 0, 1, 5, 2, 4, 0, 2]
    width = [None, vocab + 3, max(1, vocab - 7)][seed % 3]
    sampling = mixed_sampling(len(num_drafts), vocab + seed)
    spread = (0.3, 3.0, 8.0)[seed % 3]
    check(Batch(generator, num_drafts, vocab, dtype, sampling, spread, width))


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("filters", [{}, {"top_k": 300}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_a_real_vocabulary(rule: Rule, filters: dict[str, float]) -> None:
    """Narrow and flat rows, close to their drafts."""
    sampling = make_sampling(6, temperature=0.8, rule=rule, seed=3, **filters)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    for spread in (1.0, 4.0):
        check(
            Batch(
                generator,
                [2, 4, 0, 3, 4, 4],
                49_152,
                torch.bfloat16,
                sampling,
                spread,
                noise=0.1,
            )
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 1500])
def test_drafts_and_their_states(dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(64, vocab + 4, generator=generator)).to(dtype)
    for row, value in ((3, torch.nan), (4, torch.inf), (5, -torch.inf)):
        logits[row, 1:3] = value
    logits[6] = -torch.inf
    sampling, anchor = mixed_sampling(64, 11), torch.arange(64) * 5
    arguments = logits, sampling, anchor + 2, anchor, vocab
    with on_road("reference"):
        expected = draft_sample(*arguments)
    with on_road("compiled"):
        drawn = draft_sample(*arguments)
    assert torch.equal(drawn.token_ids, expected.token_ids)
    is_bad = expected.state[:, STATE_LOG_Z].isnan()
    assert is_bad.tolist() == [row in (3, 4, 6) for row in range(64)]
    assert torch.equal(drawn.state[:, STATE_LOG_Z].isnan(), is_bad)
    torch.testing.assert_close(drawn.state[~is_bad], expected.state[~is_bad], rtol=1e-6, atol=1e-6)
    exact = drawn.state[~is_bad, STATE_THRESHOLD:], expected.state[~is_bad, STATE_THRESHOLD:]
    assert torch.equal(*exact)


def test_tied_logits_are_kept_by_their_ids() -> None:
    """Filters leave the first of equal logits."""
    logits = torch.zeros(24, 3000)
    logits[:, ::7] = 2.0
    for filters in ({"top_k": 5}, {"top_p": 0.01}, {"top_k": 500, "min_p": 0.3}):
        sampling = make_sampling(24, seed=1, **filters)  # type: ignore[arg-type]
        position = torch.arange(24)
        states = []
        for road in ("reference", "compiled"):
            with on_road(road):
                states.append(draft_sample(logits, sampling, position, position, 3000))
        assert torch.equal(states[0].token_ids, states[1].token_ids)
        torch.testing.assert_close(states[0].state, states[1].state, rtol=1e-6, atol=1e-6)


def test_other_logits_are_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[..., object]] = []
    monkeypatch.setattr(sampled, "sample", lambda step: calls.append(sampled.sample))
    position = torch.arange(2)
    with on_road("compiled"):
        for logits in (torch.zeros(2, 9).half(), torch.zeros(9, 2).t()):
            draft_sample(logits, make_sampling(2), position, position, 9)
    assert not calls

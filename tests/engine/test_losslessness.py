"""Many steps of the whole engine, against exact enumeration of the target's own distribution."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributions import bound, chi_squared, total_variation
from engines import engine_config, run, tokens
from transformers import AutoModelForCausalLM

from outrider.engine.api import SamplingParams
from outrider.engine.loop import Engine

VOCAB = 4
LENGTH = 4
PROMPT = [2, 0, 3]
NUM_SAMPLES = 12_000


def processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The target's distribution after temperature, top-k, top-p, min-p: written to be read.

    Shape: [N, V] -> [N, V] float64.
    """
    logits = logits.double() / params.temperature
    out = torch.zeros_like(logits)
    for row, kept in zip(logits, out, strict=True):
        order = sorted(range(len(row)), key=lambda x: (-row[x].item(), x))
        order = order[: params.top_k or None]
        p = row[order].softmax(-1)
        before = p.cumsum(-1) - p
        keep = (before < params.top_p) & (p >= params.min_p * p[0])
        kept[torch.tensor(order)[keep]] = p[keep] / p[keep].sum()
    return out


def joint(path: Path, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of LENGTH tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    every = list(itertools.product(range(VOCAB), repeat=LENGTH))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *c[:-1]] for c in every])).logits
    rows = logits[:, len(PROMPT) - 1 :].reshape(-1, VOCAB)
    p = processed(rows, params).view(len(every), LENGTH, VOCAB)
    chosen = p.gather(2, torch.tensor(every)[..., None]).squeeze(-1).prod(-1)
    return dict(zip(every, chosen.tolist(), strict=True))


def sample(
    engine: Engine, params: SamplingParams, max_k: int, n: int = NUM_SAMPLES
) -> Counter[tuple[int, ...]]:
    """n samples, each with its own seed and its own k, 240 at a time."""
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, n, 240):
        each = [
            replace(params, seed=seed, num_speculative_tokens=seed % (max_k + 1))
            for seed in range(first, first + 240)
        ]
        counts.update(tuple(tokens(o)) for o in run(engine, [PROMPT] * 240, each))
    return counts


@pytest.mark.parametrize("proposer", ["draft_model", "ngram"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=LENGTH),
        SamplingParams(max_tokens=LENGTH, verification="block"),
        SamplingParams(max_tokens=LENGTH, verification="match"),
        SamplingParams(max_tokens=LENGTH, temperature=0.6, top_k=3),
        SamplingParams(max_tokens=LENGTH, temperature=1.5, top_p=0.8, min_p=0.05),
    ],
    ids=["token", "block", "match", "top_k", "top_p"],
)
def test_the_joint_over_many_steps_is_the_targets(
    params: SamplingParams, proposer: str, tiny_model: Callable[..., Path]
) -> None:
    target = tiny_model("llama", seed=3, vocab_size=VOCAB, scale=0.15)
    draft = tiny_model("llama", seed=4, vocab_size=VOCAB, scale=0.15, num_hidden_layers=1)
    config = engine_config(
        target,
        draft if proposer == "draft_model" else None,
        proposer=proposer,
        k=3,
        max_num_seqs=240,
        max_num_batched_tokens=2048,
        num_pages=1024,
    )
    engine = Engine(config)
    truth = joint(target, params)
    # The target is no near-uniform or near-certain distribution, on which anything passes.
    assert 0.02 < max(truth.values()) < 0.5
    counts = sample(engine, params, max_k=3)
    assert total_variation(truth, counts) < bound(len(truth), NUM_SAMPLES)
    assert chi_squared(truth, counts) < 1
    assert all(truth[c] > 0 for c in counts)
    stats = engine.stats()
    assert 0 < sum(stats.accepted_per_position) < sum(stats.drafted_per_position)


def test_a_k_that_follows_what_was_accepted_keeps_the_joint(
    tiny_model: Callable[..., Path],
) -> None:
    target = tiny_model("llama", seed=3, vocab_size=VOCAB, scale=0.15)
    draft = tiny_model("llama", seed=4, vocab_size=VOCAB, scale=0.15, num_hidden_layers=1)
    config = engine_config(target, draft, k=3, adaptive=True, max_num_seqs=40, num_pages=1024)
    engine = Engine(config)
    params = SamplingParams(max_tokens=LENGTH)
    truth = joint(target, params)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, 4800, 40):
        each = [replace(params, seed=seed) for seed in range(first, first + 40)]
        counts.update(tuple(tokens(o)) for o in run(engine, [PROMPT] * 40, each))
    assert total_variation(truth, counts) < bound(len(truth), counts.total())
    assert chi_squared(truth, counts) < 1
    drafted = engine.stats().drafted_per_position
    assert drafted[0] > drafted[2] > 0

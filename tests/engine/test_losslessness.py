"""Many steps of the whole engine, against exact enumeration of the target's own distribution."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from block_heads import save_tiny_block_head
from distributions import bound, chi_squared, total_variation
from engines import engine_config, run, sampling_config, tokens
from heads import save_tiny_head
from mtp import save_tiny_hybrid, save_tiny_mtp_model
from target_distribution import joint, sample
from tiny_models import Quick, Tiny

from outrider.engine import engine as loop
from outrider.engine.acceptance import OwnAcceptance
from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.scheduling.adaptive_speculation import AdaptiveSpeculation

VOCAB = 4
LENGTH = 4
PROMPT = [2, 0, 3]
PARAMS = {
    "token": SamplingParams(max_tokens=LENGTH, verification="token"),
    "block": SamplingParams(max_tokens=LENGTH, verification="block"),
    "match": SamplingParams(max_tokens=LENGTH, verification="match"),
    "top_k": SamplingParams(max_tokens=LENGTH, temperature=0.6, top_k=3),
    "top_p": SamplingParams(max_tokens=LENGTH, temperature=1.5, top_p=0.8, min_p=0.05),
}
# Every rule with one proposer, every proposer with one rule, the filters with one. Of joints that
# are off by 7 % in total variation, 4,800 samples see nine of ten; 2,400 do of those off by 10 %,
# the 12,000 of the sweep of those off by 5 %.
SOME: list[Any] = [(name, "draft_model", 4800) for name in ("token", "block", "match")]
SOME += [(name, "draft_model", 2400) for name in ("top_k", "top_p")] + [("token", "suffix", 2400)]
SOME += [("token", "head", 2400), ("token", "dflash", 2400), ("block", "dspark", 2400)]
SOME += [("token", "hybrid", 2400)]
SOME += [
    pytest.param(rule, proposer, 2400, marks=pytest.mark.deep)
    for rule, proposer in (
        ("block", "plain"),
        ("block", "peagle"),
        ("block", "dflash2"),
        ("token", "mtp"),
        ("block", "hybrid dflash2"),
        ("token", "hybrid dspark"),
    )
]
# "plain": draft models whose layers are not compiled. "hybrid": its MTP head drafts, or one that
# drafts blocks.
PROPOSERS = (
    "draft_model",
    "plain",
    "suffix",
    "head",
    "peagle",
    "dflash",
    "dflash2",
    "dspark",
    "mtp",
    "glm",
    "hybrid",
    "hybrid dflash2",
    "hybrid dspark",
)
EVERY = [(name, proposer) for name in PARAMS for proposer in PROPOSERS]
CASES: list[Any] = [*SOME]
# Under "match" no draft changes a token, whoever drafts: test_random_comparison.py compares each.
CASES += [pytest.param("match", "hybrid", 1200, marks=pytest.mark.deep)]
CASES += [pytest.param(*case, 12_000, marks=pytest.mark.sweep) for case in EVERY]


@pytest.mark.parametrize(("name", "proposer", "num_samples"), CASES)
def test_the_joint_over_many_steps_is_the_targets(
    name: str,
    proposer: str,
    num_samples: int,
    quick_model: Quick,
    tiny_model: Tiny,
    tmp_path: Path,
) -> None:
    params = PARAMS[name]
    num_layers = 1 if proposer in ("draft_model", "suffix") else 2  # heads read between layers
    target, draft = quick_model(3, num_layers), quick_model(4)
    if proposer == "plain":
        sizes = {"vocab_size": VOCAB, "scale": 0.15, "num_hidden_layers": 1}
        target, draft = (tiny_model("llama", seed=seed, **sizes) for seed in (3, 4))
        proposer = "draft_model"
    if proposer in ("head", "peagle"):  # of three tokens of the four: residuals have the last
        options = {"draft_vocab": 3, "scale": 0.2, "parallel": proposer == "peagle"}
        draft = save_tiny_head(tmp_path, target, boundaries=(0, 1, 2), **options)
        proposer = "draft_model"
    if proposer.startswith("hybrid"):
        types = ["linear_attention", "full_attention"]
        # With smaller weights the joint hardly depends on the state.
        options = {"num_hidden_layers": 2, "layer_types": types, "seed": 3, "scale": 0.4}
        path = tmp_path / "target"
        target = draft = save_tiny_hybrid(path, "qwen3_5_moe_text", vocab_size=VOCAB, **options)
        proposer = proposer.removeprefix("hybrid").strip() or "draft_model"
    if proposer in ("dflash", "dflash2", "dspark"):
        # Of three tokens of the four: residuals have the others.
        chain = {"dspark": {"markov": "vanilla", "draft_vocab": 3}, "dflash2": {"selector": (4, 3)}}
        options = {"boundaries": (0, 1, 2), "scale": 0.15} | chain.get(proposer, {})
        draft = save_tiny_block_head(tmp_path, target, **options)
        proposer = "draft_model"
    if proposer in ("mtp", "glm"):
        kind, layers, scale = {"mtp": ("mimo", 2, 0.15), "glm": ("glm4_moe", 3, 0.2)}[proposer]
        options = {"vocab_size": VOCAB, "num_hidden_layers": layers}
        target = draft = save_tiny_mtp_model(tmp_path, kind, seed=3, scale=scale, **options)
        proposer = "draft_model"
    engine = Engine(sampling_config(target, draft, proposer))
    truth = joint(target, PROMPT, params)
    # The target is no near-uniform or near-certain distribution, on which anything passes.
    assert 0.02 < max(truth.values()) < 0.5
    counts = sample(engine, PROMPT, params, max_k=3, n=num_samples)
    assert total_variation(truth, counts) < bound(len(truth), num_samples)
    assert chi_squared(truth, counts) < 1
    assert all(truth[c] > 0 for c in counts)
    stats = engine.stats()
    assert 0 < sum(stats.accepted_per_position) < sum(stats.drafted_per_position)


class FollowsWhatWasAccepted(AdaptiveSpeculation):
    """As many drafts as a sequence's own past leads to, whatever a step costs."""

    def choose(self, num_seqs: int, owns: Sequence[OwnAcceptance], *_: Any, **__: Any) -> list[int]:
        self.k = self._max_k
        return [int(997 * own.ratio) % (self._max_k + 1) for own in owns]


def test_a_k_that_follows_what_was_drafted_and_accepted_keeps_the_joint(
    quick_model: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "AdaptiveSpeculation", FollowsWhatWasAccepted)
    target, draft = quick_model(3), quick_model(4)
    config = engine_config(target, draft, k=3, adaptive=True, max_num_seqs=40, num_pages=1024)
    engine = Engine(config)
    params = SamplingParams(max_tokens=LENGTH)
    truth = joint(target, PROMPT, params)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, 2400, 40):
        each = [
            replace(params, seed=seed, verification="block" if seed % 2 else "token")
            for seed in range(first, first + 40)
        ]
        counts.update(tuple(tokens(o)) for o in run(engine, [PROMPT] * 40, each))
    assert total_variation(truth, counts) < bound(len(truth), counts.total())
    assert chi_squared(truth, counts) < 1
    drafted = engine.stats().drafted_per_position
    assert drafted[0] > drafted[1] > 0  # a GPU drafts for three tokens of an answer, not four

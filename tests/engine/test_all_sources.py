"""All sources of drafts, rules and kinds of requests in one batch, against exact enumeration."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from distributions import bound, chi_squared, total_variation
from engines import run, sampling_config, tokens, without_pauses
from grammars import Language, stands_for
from heads import save_tiny_head
from mtp import save_tiny_hybrid
from target_distribution import joint
from tiny_models import Quick

from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine

VOCAB, EOS, PROMPT = 4, 3, [2, 0, 3]
SOURCES = ("prediction", "grammar", "suffix", "draft_model")
PREDICTED = [1, 3, 0, 0, 2, 1, 1, 2, 2, 3, 3, 1]
# After c comes a, after the first a b: sometimes, one token alone is left.
PATTERN = "(ab|cab?a?)c?"
FORCED = Language(f"start: /{PATTERN}/", PATTERN, "abc", stands_for(*"abc"))
PLAIN = SamplingParams(max_tokens=3, ignore_eos=True)
KINDS = {
    "plain": PLAIN,
    "penalties": replace(PLAIN, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={1: 0.5}),
    "filters": replace(PLAIN, temperature=1.3, top_k=3),
    "grammar": SamplingParams(max_tokens=4, grammar=FORCED.grammar),
}
RULES = ("token", "block", "match")
NAMED_SOURCES = None, ("prediction",), ("suffix",), ("draft_model",), ("grammar",)
BATCH, NUM_BATCHES = 240, 40


def deep(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.deep)


@pytest.mark.parametrize(
    ("pair", "lag"), [("models", 0), deep("models", 1), deep("head", 1), deep("mtp", 1)]
)
def test_the_joint_is_the_targets_whoever_drafts_and_whoever_is_beside(
    pair: str, lag: int, quick_model: Quick, tmp_path: Path
) -> None:
    target, draft = quick_model(3, 2), quick_model(4)
    if pair == "head":
        options = {"boundaries": (0, 1, 2), "draft_vocab": 3, "scale": 0.2}
        draft = save_tiny_head(tmp_path, target, **options)
    if pair == "mtp":
        types = ["linear_attention", "full_attention"]
        options = {"num_hidden_layers": 2, "layer_types": types, "seed": 3, "scale": 0.4}
        target = draft = save_tiny_hybrid(tmp_path, "qwen3_5_moe_text", vocab_size=VOCAB, **options)
    config = sampling_config(target, draft, SOURCES)
    speculation = replace(config.speculation, suffix_answers_mib=1)
    engine = Engine(
        replace(config, speculation=speculation, token_table=FORCED.tokens, eos_token_ids=(EOS,))
    )
    engine.scheduler.lag = lag
    without_pauses(engine)
    truths = {
        name: joint(target, PROMPT, replace(kind, grammar=None), (EOS,), FORCED.mask)
        if kind.grammar
        else joint(target, PROMPT, kind)
        for name, kind in KINDS.items()
    }
    every = [*product(KINDS, RULES, NAMED_SOURCES, (None, 1, 3))]
    counts: dict[tuple[str, Any], Counter[tuple[int, ...]]] = {
        group: Counter() for group in product(KINDS, NAMED_SOURCES)
    }
    drafted = Counter[str | None]()
    for first in range(0, BATCH * NUM_BATCHES, BATCH):
        seeds = range(first, first + BATCH)
        # 37 has no divisor in common with their number: neighbours differ.
        names, rules, sources, ks = zip(*(every[37 * i % len(every)] for i in seeds), strict=True)
        each = [
            replace(KINDS[name], seed=seed, verification=rule, num_speculative_tokens=k)
            for name, rule, k, seed in zip(names, rules, ks, seeds, strict=True)
        ]
        outputs = run(engine, [PROMPT] * BATCH, each, [PREDICTED] * BATCH, sources)
        for group, of_one in zip(zip(names, sources, strict=True), outputs, strict=True):
            counts[group][tuple(tokens(of_one))] += 1
            drafted.update(output.source for output in of_one)
    for (name, _), counted in counts.items():
        assert counted.keys() <= {output for output, p in truths[name].items() if p > 0}
        assert total_variation(truths[name], counted) < bound(len(truths[name]), counted.total())
        assert chi_squared(truths[name], counted) < 1
    assert min(drafted[name] for name in SOURCES) > 50

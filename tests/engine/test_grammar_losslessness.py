"""Many steps under a grammar, against exact enumeration of the target's masked distribution."""

from dataclasses import replace

import pytest
from distributions import bound, chi_squared, total_variation
from engines import sampling_config
from grammars import Language, stands_for
from target_distribution import joint, sample
from tiny_models import Quick

from outrider.engine.api import SamplingParams
from outrider.engine.config import TokenTable
from outrider.engine.engine import Engine

LETTERS, EOS, VOCAB = "abc", 3, 4
LENGTH = 4
PROMPT = [2, 0, 3]
PATTERN = "(ab?c?){1,3}"
NUM_SAMPLES = 2400  # over some thirty outputs


WORDS = Language(f"start: /{PATTERN}/", PATTERN, LETTERS, stands_for(*LETTERS))
# E is a token that ends thoughts, in which the answer's letters are free.
THOUGHTS = Language(
    "start: THOUGHT? <[2]> answer\nTHOUGHT: /(?s:.+)/\nanswer: %lark {\nstart: /ab?|ba/\n}",
    "[ab]*E(ab?|ba)",
    "abE",
    TokenTable(token_bytes=(b"a", b"b", b"</t>", b"<eos>"), special_token_ids=(2, 3)),
)


@pytest.mark.parametrize(
    ("language", "proposer", "params"),
    [
        (WORDS, "draft_model", SamplingParams(max_tokens=LENGTH, verification="token")),
        (WORDS, "draft_model", SamplingParams(max_tokens=LENGTH, verification="block")),
        (
            WORDS,
            "draft_model",
            SamplingParams(max_tokens=LENGTH, verification="match", temperature=1.4),
        ),
        (WORDS, "suffix", SamplingParams(max_tokens=LENGTH, top_k=2, temperature=2.0)),
        (THOUGHTS, "draft_model", SamplingParams(max_tokens=LENGTH, verification="token")),
    ],
    ids=["token", "block", "match", "suffix", "thoughts"],
)
def test_the_joint_is_that_of_the_masked_target(
    language: Language, proposer: str, params: SamplingParams, quick_model: Quick
) -> None:
    target, draft = quick_model(3), quick_model(4)
    config = sampling_config(target, draft, proposer)
    engine = Engine(replace(config, token_table=language.tokens, eos_token_ids=(EOS,)))
    truth = joint(target, PROMPT, params, (EOS,), language.mask)
    assert sum(truth.values()) == pytest.approx(1)
    assert 0.02 < max(truth.values()) < 0.6
    params = replace(params, grammar=language.grammar)
    counts = sample(engine, PROMPT, params, max_k=3, n=NUM_SAMPLES)
    assert counts.keys() <= truth.keys()
    assert total_variation(truth, counts) < bound(len(truth), NUM_SAMPLES)
    assert chi_squared(truth, counts) < 1
    assert sum(engine.stats().accepted_per_position) > 0

"""Edits of logits under speculation: the output is the target's own, edited token by token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from edited_logits import edited_greedy
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import VOCAB

from outrider.engine.api import SamplingParams
from outrider.engine.loop import Engine

Tiny = Callable[..., Path]
PROMPTS = prompts([3, 21, 9], VOCAB, seed=4)


@pytest.fixture(scope="module")
def target(tiny_model: Tiny) -> Path:
    return tiny_model("llama", seed=0)


@pytest.fixture(scope="module")
def draft(tiny_model: Tiny) -> Path:
    return tiny_model("llama", seed=0, num_hidden_layers=1)


@pytest.fixture(scope="module")
def edits(target: Path) -> dict[str, SamplingParams]:
    """Every edit by name, each one a change to what the prompts are continued with."""
    plain = [edited_greedy(target, prompt, GREEDY) for prompt in PROMPTS]
    pairs = [tuple(output[i : i + 2]) for output in plain for i in (0, 4, 5, 9)]
    each: dict[str, SamplingParams] = {
        "repetition": replace(GREEDY, repetition_penalty=1.4),
        "frequency": replace(GREEDY, frequency_penalty=0.9),
        "presence": replace(GREEDY, presence_penalty=-1.5),
        "bias": replace(GREEDY, logit_bias={plain[0][0]: -9.0, 5: 2.5, 9: 4.0}),
        "allowed": replace(GREEDY, allowed_token_ids=tuple(range(0, VOCAB, 5))),
        "bad_words": replace(GREEDY, bad_words=(*pairs, (plain[1][0],), tuple(plain[2][3:7]))),
        "min_tokens": replace(
            GREEDY, min_tokens=7, stop_token_ids=(plain[0][2], plain[1][1], plain[2][6])
        ),
    }
    each["all"] = replace(
        GREEDY,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        logit_bias=each["bias"].logit_bias,
        allowed_token_ids=tuple(set(range(VOCAB)) - {1, 7}),
        bad_words=each["bad_words"].bad_words,
        min_tokens=7,
        stop_token_ids=each["min_tokens"].stop_token_ids,
    )
    return each


NAMES = [
    "repetition", "frequency", "presence", "bias", "allowed", "bad_words", "min_tokens", "all",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_the_edited_targets_own(
    target: Path, draft: Path, edits: dict[str, SamplingParams], name: str
) -> None:
    truth = [edited_greedy(target, prompt, edits[name]) for prompt in PROMPTS]
    assert truth != [edited_greedy(target, prompt, GREEDY) for prompt in PROMPTS]
    for config in (
        engine_config(target, k=0),
        engine_config(target, draft, k=3),
        engine_config(target, proposer="ngram", k=4),
    ):
        engine = Engine(config)
        assert [tokens(o) for o in run(engine, PROMPTS, edits[name])] == truth
        counts = engine.stats()
        assert sum(counts.drafted_per_position) > 0 or not counts.drafted_per_position
        assert sum(counts.accepted_per_position) > 0 or config.draft is None

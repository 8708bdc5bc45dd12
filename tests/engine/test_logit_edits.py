"""Edits of logits under speculation: the output is the target's own, edited token by token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engines import GREEDY, engine_config, prompts, run, tokens
from target_distribution import greedy
from tiny_models import VOCAB

from outrider.engine.api import InvalidRequestError, NewRequest, SamplingParams
from outrider.engine.loop import Engine
from outrider.engine.validation import check_request

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
    plain = [greedy(target, prompt, GREEDY) for prompt in PROMPTS]
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
    truth = [greedy(target, prompt, edits[name]) for prompt in PROMPTS]
    assert truth != [greedy(target, prompt, GREEDY) for prompt in PROMPTS]
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


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": float("nan")}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": float("inf")}),
        ("min_tokens", {"min_tokens": 25}),
        ("min_tokens", {"min_tokens": -1}),
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("logit_bias", {"logit_bias": {1: float("inf")}}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(2000), 1.0)}),
        ("allowed_token_ids", {"allowed_token_ids": (3, VOCAB)}),
        ("bad_words", {"bad_words": ((),)}),
        ("bad_words", {"bad_words": ((1, -1),)}),
        ("bad_words", {"bad_words": ((1,),) * 300}),
        ("bad_words", {"bad_words": ((1,) * 3000,)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        ("allowed_token_ids", {"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))}),
        ("allowed_token_ids", {"allowed_token_ids": (0,), "min_tokens": 1}),
        ("bad_words", {"bad_words": tuple((i,) for i in range(1, VOCAB)), "min_tokens": 1}),
    ],
)
def test_unusable_edits_are_refused_by_name(field: str, change: dict[str, object]) -> None:
    params = replace(GREEDY, **change)  # type: ignore[arg-type]
    new = NewRequest(request_id="bad", prompt_token_ids=[1], params=params)
    vocab_size = 5000 if len(params.logit_bias) > VOCAB else VOCAB
    with pytest.raises(InvalidRequestError, match=f"^{field}"):
        check_request(new, 256, vocab_size, eos_token_ids=(0,))

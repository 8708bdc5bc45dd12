"""Looked-up drafts are as many as are worth their rows, whatever k is for a model's."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise, repeat
from operator import mul

import pytest
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import VOCAB, Tiny

from outrider.engine.engine import Engine
from outrider.engine.request import Hits
from outrider.engine.scheduling.adaptive_speculation import MIN_TIMES, AdaptiveSpeculation
from outrider.engine.scheduling.lookups import Worth

PROMPT = prompts([9], VOCAB)[0]
LONG = replace(GREEDY, max_tokens=40)


def rate(num_tokens: float, row_cost: float, chances: list[float]) -> float:
    return (num_tokens + sum(chances)) / (1 + row_cost * len(chances))


def test_as_many_drafts_are_taken_as_raise_the_rate_most() -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_tokens, row_cost = rng.uniform(1, 64), rng.uniform(0, 0.3)
        acceptance, num_assumed, most = rng.uniform(0.05, 1), rng.randint(0, 9), rng.randint(0, 32)
        chances = list(accumulate(repeat(acceptance, num_assumed + most), mul))[num_assumed:]
        taken = Worth(num_tokens, row_cost).take(acceptance, num_assumed, most)
        best = max(range(most + 1), key=lambda n: rate(num_tokens, row_cost, chances[:n]))
        assert taken == best


def test_what_others_have_taken_counts() -> None:
    shared = Worth(2, 0.1)
    assert shared.take(0.98, 0, 32) > Worth(2, 0.1).take(0.8, 0, 32) > shared.take(0.8, 0, 32) > 0


def test_drafts_that_others_would_beat_are_not_taken() -> None:
    assert Worth(1, 0.05).take(0.6, 0, 32, otherwise=1.0) > 0
    assert Worth(1, 0.05).take(0.6, 0, 32, otherwise=1.5) == 0


def test_a_text_is_trusted_for_what_agrees_and_for_what_it_has_led_to() -> None:
    hits = Hits()
    assert hits.acceptance(1) == pytest.approx(2 / 3)
    assert hits.acceptance(32) == pytest.approx(33 / 34)
    hits.observe(20, 20)
    assert hits.acceptance(1) == pytest.approx(22 / 23)
    for _ in range(20):
        hits.observe(8, 0)
    assert hits.acceptance(2) < 0.4 < 0.7 < hits.acceptance(32)
    for _ in range(60):
        hits.observe(0, 0)
    assert hits.acceptance(2) == pytest.approx(0.75, abs=0.01)  # what was long ago is forgotten


def test_their_rows_are_priced_and_teach_nothing_else() -> None:
    adaptive = AdaptiveSpeculation(3)
    guessed = adaptive.worth(2, 0).take(0.9, 0, 32)
    assert 0 < guessed < 32
    for _ in range(20):
        adaptive.observe(0, 2, [0, 0], [0, 0], 1.0)
    taught = adaptive.accepted(3), adaptive.choose(2)
    for num_drafts in (8, 32) * MIN_TIMES:  # another row for both takes a fiftieth of a step
        time_s = 1.0 + 0.01 * num_drafts
        adaptive.observe(None, 2, [0], [0], time_s, num_drafts)
    assert (adaptive.accepted(3), adaptive.choose(2)) == taught
    assert adaptive.worth(2, 0).take(0.9, 0, 32) == Worth(2, 0.01).take(0.9, 0, 32) > guessed
    for _ in range(40):
        adaptive.observe(0, 2, [0], [0], 9.0, 8)
    assert adaptive.worth(2, 0).take(0.9, 0, 32) == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_right_prediction_takes_few_steps_where_the_model_does_not_draft(
    tiny_model: Tiny, lag: int
) -> None:
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    engine = Engine(engine_config(target, draft, k=2, adaptive=True))
    engine.scheduler.lag = lag
    adaptive = engine.sequences.adaptive
    assert adaptive is not None
    adaptive.choose = lambda *args, **options: 0  # type: ignore[method-assign]
    [plain] = run(engine, [PROMPT], LONG)
    assert len(plain) == 40
    [outputs] = run(engine, [PROMPT], LONG, [tokens(plain)])
    assert tokens(outputs) == tokens(plain)
    assert len(outputs) <= 8
    [outputs] = run(engine, [PROMPT], replace(LONG, num_speculative_tokens=2), [tokens(plain)])
    assert len(outputs) >= 14  # who names a k gets no more
    [outputs] = run(engine, [PROMPT], replace(LONG, num_speculative_tokens=0), [tokens(plain)])
    assert len(outputs) == 40


@pytest.mark.parametrize("lag", [0, 1])
def test_a_wrong_prediction_stops_being_drafted(tiny_model: Tiny, lag: int) -> None:
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, proposer="ngram", k=2))
    engine.scheduler.lag = lag
    params = replace(GREEDY, max_tokens=60)
    [plain] = run(engine, [PROMPT], replace(params, num_speculative_tokens=0))
    truth = tokens(plain)
    # Two right tokens lead to every place, and a wrong one follows.
    wrong = [t for a, b in pairwise(truth) for t in (a, b, (b + 1) % VOCAB)]
    [outputs] = run(engine, [PROMPT], params, [wrong])
    assert tokens(outputs) == truth
    num_drafts = outputs[-1].num_draft_tokens - outputs[-1].num_accepted_tokens
    assert num_drafts < 2 * len(truth)

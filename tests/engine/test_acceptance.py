"""How often drafts of a model are accepted: where sequences differ, and where hardly any is."""

import logging
import random
from dataclasses import replace

import pytest
from engines import GREEDY, engine_config, prompts, run
from tiny_models import VOCAB, Tiny

from outrider.engine.acceptance import Acceptance, DeadDrafts, OwnAcceptance
from outrider.engine.api import NewRequest
from outrider.engine.engine import Engine
from outrider.engine.learning import learn_costs


def test_drafts_that_never_match_are_reported_once_with_likely_causes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafts = DeadDrafts()
    assert not any(drafts.observe(10, 1) for _ in range(1000))  # a tenth is accepted
    assert not caplog.text
    for _ in range(3):
        seen = [drafts.observe(10, i % 4 == 0) for i in range(200)]
        assert seen == [False] * 199 + [True]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "of the last 2000 drafts, the target accepted 50" in record.message
    for cause in ("another release", "quantised", "draft.head_layers"):
        assert cause in record.message


def test_dead_drafts_of_an_engine_are_counted(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DeadDrafts, "NUM_DRAFTS", 20)
    target, other = (tiny_model("llama", seed=seed) for seed in (0, 9))
    engine = Engine(engine_config(target, other, k=4, adaptive=True))
    learn_costs(engine)
    assert not caplog.records  # dummies say nothing of drafts
    params = replace(GREEDY, num_speculative_tokens=4)
    run(engine, prompts([9, 20, 3, 7], VOCAB), params)
    assert engine.stats().dead_drafts > 0
    assert len(caplog.records) == 1
    good = Engine(engine_config(target, target, k=4))
    run(good, prompts([9, 20, 3, 7], VOCAB), params)
    assert good.stats().dead_drafts == 0


def test_later_positions_are_no_better_than_the_sequences_that_come_to_them() -> None:
    """Of half of the sequences 90% of the drafts are accepted, of the others 20%, anywhere."""
    acceptance, rng, k = Acceptance(3), random.Random(0), 3
    owns, chances = [OwnAcceptance() for _ in range(16)], [0.9, 0.2] * 8
    for _ in range(200):
        accepted = [next((j for j in range(k) if rng.random() > c), k) for c in chances]
        ratios = [own.ratio for own in owns]
        for own, num_accepted in zip(owns, accepted, strict=True):
            own.observe(k, num_accepted, acceptance.by_position)
        acceptance.observe([k] * 16, accepted, ratios=ratios)
    good = sum(own.ratio for own in owns[::2]) / 8
    bad = sum(own.ratio for own in owns[1::2]) / 8
    assert [good * chance for chance in acceptance.by_position] == pytest.approx(
        [0.9] * k, abs=0.08
    )
    assert [bad * chance for chance in acceptance.by_position] == pytest.approx([0.2] * k, abs=0.08)


def test_a_sequence_is_taken_to_be_like_those_as_long(tiny_model: Tiny) -> None:
    target, other = (tiny_model("llama", seed=seed) for seed in (0, 9))
    engine = Engine(engine_config(target, other, k=3))  # most drafts are wrong
    of_all = engine.sequences.acceptance
    long, short = prompts([100, 9], VOCAB)
    run(engine, [long], replace(GREEDY, max_tokens=20))
    of_long = of_all.of_length(110).ratio
    assert of_long < 0.8
    assert of_all.of_length(9).ratio == 1.0
    engine.submit(
        [
            NewRequest(request_id=str(len(prompt)), prompt_token_ids=prompt, params=GREEDY)
            for prompt in (long, short)
        ]
    )
    engine.scheduler.schedule()
    owns = [request.acceptance for request in engine.sequences.running]
    assert [own.ratio for own in owns] == [of_long, 1.0]
    for own in owns:  # nothing is seen of them; the others go on
        own.observe(0, 0, [], of_long)
    assert [own.ratio for own in owns] == [of_long, of_long]


def test_what_is_known_of_all_stays_a_chance_however_long_sequences_are_compared_with_it() -> None:
    """Half of all ratios and twice all chances would say the same of each sequence."""
    rng, of_all = random.Random(0), Acceptance(3)
    sequences = [OwnAcceptance() for _ in range(8)]
    for step in range(6000):
        accepted = [next((j for j in range(3) if rng.random() >= 0.7), 3) for _ in sequences]
        ratios, alike = [own.ratio for own in sequences], of_all.of_length(1000)
        for own, num_accepted in zip(sequences, accepted, strict=True):
            alike.observe(3, num_accepted, of_all.by_position)
            own.observe(3, num_accepted, of_all.by_position, alike.ratio)
        of_all.observe([3] * 8, accepted, ratios=ratios)
        ended = sequences[step % 8] = OwnAcceptance()
        ended.ratio = alike.ratio
    assert of_all.by_position == pytest.approx([0.7] * 3, abs=0.1)

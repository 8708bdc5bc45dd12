"""Drafts of a model that are hardly ever accepted are noticed."""

import logging
from dataclasses import replace

import pytest
from engines import GREEDY, engine_config, prompts, run
from tiny_models import VOCAB, Tiny

from outrider.engine.acceptance import DeadDrafts
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

"""Logprobs are gathered before the GPU goes on, and nobody waits for them in between."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run
from tiny_models import DEVICE, VOCAB

from outrider.engine.engine import Engine
from outrider.engine.scoring import logprobs, verifier

ASKS = [
    GREEDY,
    replace(GREEDY, logprobs=2),
    replace(GREEDY, prompt_logprobs=3, logprobs=0),
    replace(GREEDY, logprobs=1, repetition_penalty=1.2),
]


@pytest.fixture
def engine(target: Path, draft: Path) -> Engine:
    engine = Engine(engine_config(target, draft, k=3))
    engine.scheduler.lag = 1
    return engine


def test_all_is_gathered_before_the_next_step_is_launched_and_read_behind_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            events.append(name)
            return function(*args, **options)

        return call

    for module in (verifier, logprobs):
        gather = noted("gather", module.gather_logprobs)
        monkeypatch.setattr(module, "gather_logprobs", gather)
    for name in ("launch", "verify", "read"):
        monkeypatch.setattr(engine.worker, name, noted(name, getattr(engine.worker, name)))

    run(engine, prompts([20, 30, 25, 8], VOCAB), ASKS)
    # A step: launched; the one before it read; verified, with all that it gathers.
    *steps, _ = " ".join(events).split("launch ")[1:]
    assert sum("gather" in step for step in steps) > 5
    for step in steps[1:]:
        before, after = step.split("verify")
        assert "read" in before
        assert "read" not in after


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_nothing_waits_for_the_gpu_until_the_step_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [20, 30, 25, 8, 12, 9]
    edited = replace(GREEDY, logit_bias={3: 2.0}, min_tokens=2, bad_words=((4, 5), (6,)))
    asks = [*ASKS, edited, replace(GREEDY, allowed_token_ids=tuple(range(30)))]
    run(engine, prompts(lengths, VOCAB), asks)  # compiles
    launch, read = engine.worker.launch, engine.worker.read
    modes: list[str] = []

    def launching(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        modes.append("error")
        return launch(*args)

    def reading(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return read(*args)

    monkeypatch.setattr(engine.worker, "launch", launching)
    monkeypatch.setattr(engine.worker, "read", reading)
    try:
        run(engine, prompts(lengths, VOCAB, seed=1), asks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert modes

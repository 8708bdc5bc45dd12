"""Plain tokens scored before the host knows them change nobody's output."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import VOCAB

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.engine import Engine

Tiny = Callable[..., Path]
FIRST = [
    replace(GREEDY, max_tokens=9),
    SamplingParams(max_tokens=30, seed=4),
    SamplingParams(max_tokens=14, seed=2, temperature=0.7, repetition_penalty=1.3),
]
LATER = [SamplingParams(max_tokens=8, seed=7), replace(GREEDY, max_tokens=5, logprobs=2)]


def build(tiny_model: Tiny, *, plans_ahead: bool, **options: int) -> Engine:
    engine = Engine(engine_config(tiny_model("llama", seed=0), proposer="none", **options))
    engine.scheduler.plans_ahead = plans_ahead
    return engine


def serve(engine: Engine) -> list[list[int]]:
    """Three sequences, and after some steps two more; what each gets."""
    params = [*FIRST, *LATER]
    requests = [
        NewRequest(request_id=str(i), prompt_token_ids=prompt, params=params[i])
        for i, prompt in enumerate(prompts([3, 21, 8, 15, 6], VOCAB))
    ]
    drawn: list[list[int]] = [[] for _ in requests]
    engine.submit(requests[: len(FIRST)])
    num_steps = 0
    while engine.has_work():
        for output in engine.step():
            drawn[int(output.request_id)] += output.token_ids
        num_steps += 1
        if num_steps == 5:
            engine.submit(requests[len(FIRST) :])
    engine.check_integrity()
    return drawn


def rows_by_pass(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The rows of each of the target's passes, and whether it ran ahead."""
    passes: list[tuple[int, bool]] = []
    forward = engine.target._model.forward

    def counted(batch: object) -> object:
        passes.append((len(batch.positions_np), batch.is_relative))
        return forward(batch)

    monkeypatch.setattr(engine.target._model, "forward", counted)
    return passes


def test_scoring_ahead_changes_nobodys_output(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = serve(build(tiny_model, plans_ahead=False))
    engine = build(tiny_model, plans_ahead=True)
    passes = rows_by_pass(engine, monkeypatch)
    assert serve(engine) == expected
    # Prompts; ahead from then on; those that came later have a pass of their own in between.
    assert passes[:6] == [(32, False), *[(3, True)] * 5]
    assert passes[6] == (21, False)
    # Logprobs, which one of them wants, are gathered before: they keep nobody from it.
    assert passes[7:] == [(n, True) for n, _ in passes[7:]]


def test_preemption_forgets_what_was_scored_ahead(tiny_model: Tiny) -> None:
    short = prompts([9, 10, 11], VOCAB)  # with their output of 24, twice as much as there is room
    outputs = []
    for plans_ahead in (False, True):
        engine = build(tiny_model, plans_ahead=plans_ahead, num_pages=16)
        outputs.append([tokens(o) for o in run(engine, short, GREEDY)])
    assert outputs[0] == outputs[1]
    assert engine.stats().preemptions > 0


def test_nothing_is_scored_behind_a_last_token(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(tiny_model, plans_ahead=True)
    passes = rows_by_pass(engine, monkeypatch)
    run(engine, prompts([4], VOCAB), replace(GREEDY, max_tokens=6))
    assert passes == [(4, False), *[(1, True)] * 5]

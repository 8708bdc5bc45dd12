"""Drafts drawn before the host knows what they follow change nobody's output."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import VOCAB

from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine

Tiny = Callable[..., Path]
PARAMS = [
    SamplingParams(max_tokens=40, seed=4),
    replace(GREEDY, num_speculative_tokens=1),
    SamplingParams(max_tokens=13, seed=2, temperature=0.7, top_k=20),
    replace(GREEDY, num_speculative_tokens=0, max_tokens=30),
    SamplingParams(max_tokens=30, seed=3, verification="block"),
    replace(GREEDY, logprobs=2),
    SamplingParams(max_tokens=7, seed=9, repetition_penalty=1.3),
]


def engines(tiny_model: Tiny, **options: int) -> tuple[Engine, Engine]:
    """One that never drafts ahead, and one that does."""
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    after, ahead = (Engine(engine_config(target, draft, k=3, **options)) for _ in range(2))
    after.scheduler.plans_ahead = ahead.scheduler.plans_ahead = True
    after.proposer._propose_ahead = lambda plan: None  # type: ignore[method-assign]
    return after, ahead


def drafted_late(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step drafts for after it was scheduled."""
    counts: list[int] = []
    catch_up = engine.proposer._catch_up

    def counted(shares: list) -> object:
        counts.append(len(shares))
        return catch_up(shares)

    monkeypatch.setattr(engine.proposer, "_catch_up", counted)
    return counts


@pytest.mark.parametrize("max_num_seqs", [8, 3], ids=["together", "in-turn"])
def test_drafting_ahead_changes_nobodys_output(tiny_model: Tiny, max_num_seqs: int) -> None:
    after, ahead = engines(tiny_model, max_num_seqs=max_num_seqs)
    mixed = prompts([3, 40, 1, 17, 8, 5, 6], VOCAB)
    expected = [tokens(o) for o in run(after, mixed, PARAMS)]
    assert [tokens(o) for o in run(ahead, mixed, PARAMS)] == expected


def test_preemption_forgets_what_was_drafted_ahead(tiny_model: Tiny) -> None:
    after, ahead = engines(tiny_model, num_pages=16)
    short = prompts([9, 10, 11], VOCAB)  # with their output of 24, twice as much as there is room
    expected = [tokens(o) for o in run(after, short, GREEDY)]
    assert [tokens(o) for o in run(ahead, short, GREEDY)] == expected
    assert ahead.stats().preemptions > 0


def test_a_sequence_that_goes_on_is_drafted_for_ahead(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ahead = engines(tiny_model)
    counts = drafted_late(ahead, monkeypatch)
    run(ahead, prompts([5, 6], VOCAB), SamplingParams(max_tokens=30, seed=1))
    assert sum(counts) == 0  # behind their prompts neither
    assert sum(ahead.stats().accepted_per_position) > 0


def test_samples_share_what_the_draft_read_of_their_prompt(tiny_model: Tiny) -> None:
    after, ahead = engines(tiny_model, max_num_batched_tokens=64)
    params = [SamplingParams(max_tokens=8, seed=i) for i in range(4)]
    prompt = prompts([40], VOCAB)
    expected = [tokens(run(after, prompt, [each])[0]) for each in params]
    # Each would have to read all 40 tokens again, more than one pass holds.
    assert [tokens(o) for o in run(ahead, prompt * 4, params)] == expected


def test_the_longest_sequence_is_not_drafted_for_past_its_end(tiny_model: Tiny) -> None:
    target = tiny_model("llama", seed=0, max_position_embeddings=32)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1, max_position_embeddings=32)
    engine = Engine(engine_config(target, draft, k=3))
    engine.scheduler.plans_ahead = True
    (outputs,) = run(engine, prompts([5], VOCAB), replace(GREEDY, max_tokens=100))
    assert len(tokens(outputs)) == 27

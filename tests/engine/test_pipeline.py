"""Steps that are launched before the host has read the one before change nobody's output."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import VOCAB, Tiny

from outrider.engine.api import NewRequest, ProcessorChoice, RequestOutput, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.models.network import Pass
from outrider.engine.plan import Plan

K = 3
PARAMS = [
    SamplingParams(max_tokens=40, seed=4),
    replace(GREEDY, num_speculative_tokens=1),
    SamplingParams(max_tokens=13, seed=2, temperature=0.7, top_k=20),
    replace(GREEDY, num_speculative_tokens=0, max_tokens=30),
    SamplingParams(max_tokens=30, seed=3, verification="block"),
    replace(GREEDY, logprobs=2),
    SamplingParams(max_tokens=7, seed=9, repetition_penalty=1.3),
    replace(GREEDY, prompt_logprobs=2, logit_bias={5: -2.0}),
]
# An edit that the host applies, behind tokens that it has to know.
PROCESSORS = ("parity = logits_processors:FavourParity",)


def engines(
    tiny_model: Tiny, *, proposer: str = "draft_model", **options: int
) -> tuple[Engine, Engine]:
    """One that reads each step before the next, and one that lags a step behind."""
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    config = engine_config(
        target, draft if proposer == "draft_model" else None, proposer=proposer, k=K, **options
    )
    config = replace(config, logits_processors=PROCESSORS)
    each, lagging = Engine(config), Engine(config)
    each.scheduler.lag, lagging.scheduler.lag = 0, 1
    return each, lagging


def settled(drawn: list[int], params: SamplingParams, proposer: str = "") -> list[int]:
    """What a lag must not change. Under `token` and `block` the last tokens hang on how many drafts
    there was room for, and behind a step that is not read yet the room is not known. Looked-up
    drafts hang on what is known.
    """
    fixed = params.temperature <= 0 or params.verification == "match"
    of_drawn = [] if proposer == "suffix" else drawn[: -2 * (K + 1)]
    return drawn if fixed else of_drawn


def launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The rows that each step draws from, and whether it was launched behind one in flight."""
    seen: list[tuple[int, bool]] = []
    launch = engine.worker.launch

    def noted(plan: Plan) -> Any:
        seen.append((len(plan.emitting), engine._in_flight is not None))
        return launch(plan)

    monkeypatch.setattr(engine.worker, "launch", noted)
    return seen


@pytest.mark.parametrize(
    ("proposer", "max_num_seqs"),
    [
        ("draft_model", 3),
        ("suffix", 8),
        ("none", 3),
        pytest.param("draft_model", 8, marks=pytest.mark.deep),
        pytest.param("suffix", 3, marks=pytest.mark.deep),
        pytest.param("none", 8, marks=pytest.mark.deep),
    ],
)
def test_a_lag_changes_nobodys_output(tiny_model: Tiny, proposer: str, max_num_seqs: int) -> None:
    each, lagging = engines(tiny_model, proposer=proposer, max_num_seqs=max_num_seqs)
    mixed = prompts([3, 40, 1, 17, 8, 5, 6, 30], VOCAB)
    got, expected = run(lagging, mixed, PARAMS), run(each, mixed, PARAMS)
    for ours, theirs, params in zip(got, expected, PARAMS, strict=True):
        assert settled(tokens(ours), params, proposer) == settled(tokens(theirs), params, proposer)
    reported = [[logprobs_of(o) for o in outputs] for outputs in (got, expected)]
    assert reported[0] == reported[1]


def test_a_choice_of_k_leaves_tokens_in_flight_alone(tiny_model: Tiny) -> None:
    """k rises from 0 while a step is in flight: the host must not draft after tokens it lacks."""
    each, lagging = engines(tiny_model, proposer="suffix", adaptive=True)
    repeated = [2 * prompt for prompt in prompts([5, 6, 7, 8] * 4, VOCAB)]
    for prompt in repeated:  # each alone, so that k is chosen anew
        (got,), (expected,) = (run(engine, [prompt], GREEDY) for engine in (lagging, each))
        assert tokens(got) == tokens(expected)


def logprobs_of(outputs: list[RequestOutput]) -> list[Any]:
    """What was returned of the prompt and of the output, however it was cut into steps."""
    return [
        [entry.top[0][0] for o in outputs for entry in getattr(o, field) or ()]
        for field in ("prompt_logprobs", "logprobs")
    ]


@pytest.mark.parametrize("proposer", ["draft_model", "none"])
def test_what_was_launched_for_a_preempted_sequence_is_thrown_away(
    tiny_model: Tiny, proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, lagging = engines(tiny_model, proposer=proposer, num_pages=16)
    commit, are_void = lagging.committer.commit, list[bool]()

    def recorded(plan: Plan, *times: float) -> list[RequestOutput]:
        are_void.extend(scheduled.is_void for scheduled in plan.scheduled)
        return commit(plan, *times)

    monkeypatch.setattr(lagging.committer, "commit", recorded)
    short = prompts([9, 10, 11], VOCAB)  # with their output of 24, twice as much as there is room
    expected = [tokens(o) for o in run(each, short, GREEDY)]
    assert [tokens(o) for o in run(lagging, short, GREEDY)] == expected
    assert lagging.stats().preemptions > 0
    # Nobody who is in flight asks for pages by plain decoding, or gives way.
    assert any(are_void) == (proposer == "draft_model")


@pytest.mark.parametrize("proposer", ["draft_model", "none"])
def test_every_step_but_the_first_is_launched_behind_another(
    tiny_model: Tiny, proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lagging = engines(tiny_model, proposer=proposer)
    seen = launches(lagging, monkeypatch)
    run(lagging, prompts([5, 6], VOCAB), SamplingParams(max_tokens=30, seed=1))
    assert [is_behind for _, is_behind in seen] == [False] + [True] * (len(seen) - 1)


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(6, None), (100, 10)])
def test_nothing_is_launched_behind_a_last_token(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, max_tokens: int, max_model_len: int | None
) -> None:
    config = engine_config(tiny_model("llama", seed=0))
    engine = Engine(replace(config, max_model_len=max_model_len))
    engine.scheduler.lag = 1
    seen = launches(engine, monkeypatch)
    run(engine, prompts([4], VOCAB), replace(GREEDY, max_tokens=max_tokens))
    assert len(seen) == 6


def test_a_stop_token_throws_away_what_was_launched_behind_it(tiny_model: Tiny) -> None:
    _, lagging = engines(tiny_model)
    prompt = prompts([7], VOCAB)
    [outputs] = run(lagging, prompt, replace(GREEDY, max_tokens=20))
    stop = tokens(outputs)[9]
    first = tokens(outputs).index(stop)
    params = replace(GREEDY, max_tokens=20, stop_token_ids=(stop,))
    for _ in range(2):  # the second finds the pages of the first
        [stopped] = run(lagging, prompt, params)
        assert tokens(stopped) == tokens(outputs)[: first + 1]
        assert stopped[-1].finish_reason == "stop"
    assert lagging.stats().pages_used == 0


def test_sequences_come_and_go_under_way(tiny_model: Tiny) -> None:
    asked = prompts([3, 21, 8, 15, 6, 33], VOCAB)
    each, lagging = engines(tiny_model, max_num_seqs=4)

    def serve(engine: Engine) -> list[list[int]]:
        drawn: list[list[int]] = [[] for _ in asked]
        requests = [
            NewRequest(request_id=str(i), prompt_token_ids=prompt, params=PARAMS[i])
            for i, prompt in enumerate(asked)
        ]
        engine.submit(requests[:3])
        num_steps = 0
        while engine.has_work():
            for output in engine.step():
                drawn[int(output.request_id)] += output.token_ids
            num_steps += 1
            if num_steps == 4:
                engine.submit(requests[3:])
            if num_steps == 7:
                engine.abort(["4"])
        engine.check_integrity()
        return [
            settled(*each) for i, each in enumerate(zip(drawn, PARAMS[:6], strict=True)) if i != 4
        ]

    assert serve(lagging) == serve(each)


def test_the_longest_sequence_goes_to_its_end(tiny_model: Tiny) -> None:
    target = tiny_model("llama", seed=0, max_position_embeddings=32)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1, max_position_embeddings=32)
    engine = Engine(engine_config(target, draft, k=K))
    engine.scheduler.lag = 1
    (outputs,) = run(engine, prompts([5], VOCAB), replace(GREEDY, max_tokens=100))
    assert len(tokens(outputs)) == 27


def test_samples_share_what_the_draft_read_of_their_prompt(tiny_model: Tiny) -> None:
    each, lagging = engines(tiny_model, max_num_batched_tokens=64)
    params = [SamplingParams(max_tokens=8, seed=i, verification="match") for i in range(4)]
    prompt = prompts([40], VOCAB)
    expected = [tokens(run(each, prompt, [one])[0]) for one in params]
    outputs = run(lagging, prompt * 4, params)
    assert [tokens(o) for o in outputs] == expected
    assert [o[-1].num_cached_tokens for o in outputs] == [0, 36, 36, 36]
    assert sum(lagging.stats().accepted_per_position) > 0


@pytest.mark.parametrize("k", [0, 3])
def test_the_host_reads_first_only_if_drafts_need_it(
    tiny_model: Tiny, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, lagging = engines(tiny_model)
    asked = prompts([6, 9], VOCAB)
    parity = ProcessorChoice("parity", {"bias": 3.0})
    params = [
        replace(GREEDY, num_speculative_tokens=k, logits_processors=(parity,)),
        replace(GREEDY, num_speculative_tokens=k),
    ]
    expected = [tokens(o) for o in run(each, asked, params)]
    seen = launches(lagging, monkeypatch)
    assert [tokens(o) for o in run(lagging, asked, params)] == expected
    assert any(is_behind for _, is_behind in seen) == (k == 0)


def test_a_sequence_that_starts_over_is_right_behind_what_was_launched(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose drafts lead to NaN is computed again without them, while another one behind it
    is on its way.
    """
    each, lagging = engines(tiny_model)
    prompt = prompts([8, 11], VOCAB)
    expected = [tokens(o) for o in run(each, prompt, GREEDY)]
    score, counted = lagging.worker.scorer.score, iter(range(10**6))

    def spoilt(plan: Plan) -> Pass:
        scored = score(plan)
        if next(counted) != 3:
            return scored
        return scored._replace(logits=torch.full_like(scored.logits, torch.nan))

    monkeypatch.setattr(lagging.worker.scorer, "score", spoilt)
    assert [tokens(o) for o in run(lagging, prompt, GREEDY)] == expected

"""On a GPU the device chooses which drafts of a batch are verified. Here a CPU does the same."""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from block_heads import save_tiny_block_head
from distributions import bound, chi_squared, total_variation
from engines import GREEDY, engine_config, is_greedy, lagging, prompts, run, tokens, without_pauses
from heads import save_tiny_head
from ranked import Budgeted
from target_distribution import joint
from tiny_models import VOCAB, Tiny

from outrider.engine import engine as loop
from outrider.engine.api import NewRequest, RequestOutput, SamplingParams, TokenLogprobs
from outrider.engine.engine import Engine
from outrider.engine.pace import _kind
from outrider.engine.plan import Plan
from outrider.engine.proposers import draws
from outrider.engine.scheduling.adaptive_speculation import AdaptiveSpeculation
from outrider.engine.worker import LaunchedStep

K = 3
LENGTH, PROMPT = 4, [2, 0, 3]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines rank drafts, as on a GPU."""
    monkeypatch.setattr(draws, "stops_early_on", lambda device: False)
    monkeypatch.setattr(loop, "AdaptiveSpeculation", Budgeted)


def draft_of(kind: str, target: Path, path: Path, tiny_model: Tiny, **sizes: Any) -> Path:
    if kind == "head":
        return save_tiny_head(path, target)
    if kind == "dspark":
        return save_tiny_block_head(path, target, markov="vanilla", confidence="token")
    if kind == "dflash":
        return save_tiny_block_head(path, target)
    if kind == "itself":
        return target
    return tiny_model("llama", seed=1, **sizes)


def steps_of(engine: Engine) -> list[Plan]:
    """Each step's plan, once it is read."""
    plans: list[Plan] = []
    read = engine.worker.read

    def noted(step: LaunchedStep) -> None:
        in_flight = _kind(step.plan)
        read(step)
        assert _kind(step.plan) == in_flight, "nobody would know how long such steps take"
        plans.append(step.plan)

    engine.worker.read = noted  # type: ignore[method-assign]
    return plans


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kind", ["draft_model", "itself", "head", "dflash", "dspark"])
def test_answers_are_the_targets_and_as_many_drafts_are_verified_as_were_asked_for(
    kind: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 4, "scale": 0.2}  # so few tokens that many drafts are accepted
    target = tiny_model("llama", seed=0, num_hidden_layers=6, **sizes)
    draft = draft_of(kind, target, tmp_path, tiny_model, **sizes)
    engine = lagging(engine_config(target, draft, k=K, adaptive=True, max_num_seqs=8))
    plans, given = steps_of(engine), prompts([5, 9, 3, 17, 4], 4)
    score, num_logits = engine.worker.scorer.score, []

    def counted(plan: Plan) -> Any:
        num_logits.append(len((scored := score(plan)).logits))
        return scored

    engine.worker.scorer.score = counted  # type: ignore[method-assign]
    outputs = run(engine, given, GREEDY)
    for prompt, each in zip(given, outputs, strict=True):
        assert is_greedy(target, prompt, tokens(each))
    for plan, rows in zip(plans, num_logits, strict=False):  # the last may be void
        assert rows == sum(s.num_drafts + 1 for s in plan.emitting)
        if plan.chosen is not None:
            assert plan.budget is not None
            verified = sum(s.num_drafts for s in plan.ranked)
            assert verified == plan.chosen.num_drafts <= plan.budget.num_drafts
            assert all(s.num_drafts <= s.num_made == s.max_drafts for s in plan.ranked)
    counts = [s.num_drafts for plan in plans for s in plan.ranked]
    assert set(counts) == set(range(K + 1))
    stats = engine.stats()
    assert sum(stats.accepted_per_position) > 10
    num_drafts = sum(each[-1].num_draft_tokens for each in outputs)
    assert num_drafts == sum(stats.drafted_per_position) <= sum(counts)  # some were void


@pytest.mark.parametrize(("kind", "falls_behind"), [("draft_model", True), ("head", False)])
def test_a_head_never_has_to_read_what_steps_without_drafts_had(
    kind: str, falls_behind: bool, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    class Noted(AdaptiveSpeculation):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given.append(kwargs["falls_behind"])
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(loop, "AdaptiveSpeculation", Noted)
    target = tiny_model("llama", seed=0, num_hidden_layers=6)
    Engine(engine_config(target, draft_of(kind, target, tmp_path, tiny_model), adaptive=True))
    assert given == [falls_behind]


MIXED: list[SamplingParams] = [
    GREEDY,
    replace(GREEDY, logprobs=2),
    replace(GREEDY, repetition_penalty=1.3),
    replace(GREEDY, num_speculative_tokens=2),
    SamplingParams(max_tokens=20, verification="match", seed=4),
    replace(GREEDY, prompt_logprobs=1),
    SamplingParams(max_tokens=20, temperature=0.7, top_k=5, verification="match", seed=5),
    replace(GREEDY, num_speculative_tokens=0),
    replace(GREEDY, allowed_token_ids=(3, 4, 5, 6), logprobs=1),
]


@pytest.mark.parametrize("kind", ["draft_model", "head"])
def test_beside_others_of_every_kind_nobodys_answer_changes(
    kind: str, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edits, logprobs and prompt logprobs find their rows; a k of one's own is kept."""
    target = tiny_model("llama", seed=0, num_hidden_layers=6)
    draft = draft_of(kind, target, tmp_path, tiny_model)
    config = engine_config(target, draft, k=K, adaptive=True, max_num_seqs=16)
    given = prompts([5, 9, 3, 17, 4, 40, 6, 5, 8], VOCAB)
    expected = run(Engine(config), given, MIXED)
    monkeypatch.setattr(draws, "stops_early_on", lambda device: False)
    monkeypatch.setattr(loop, "AdaptiveSpeculation", Budgeted)
    engine = lagging(config)
    plans = steps_of(engine)
    for want, got in zip(expected, run(engine, given, MIXED), strict=True):
        assert tokens(got) == tokens(want)
        for a, b in zip(entries(got), entries(want), strict=True):
            assert [i for i, _ in a.top] == [i for i, _ in b.top]
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    ranked = [s for plan in plans for s in plan.ranked]
    assert {s.request.request_id for s in ranked} == {"0", "4", "5", "6"}
    assert {s.num_drafts for s in ranked} == set(range(K + 1))
    named = [s.num_drafts for plan in plans for s in plan.scheduled if s.request.request_id == "3"]
    assert max(named) == 2


def entries(outputs: list[RequestOutput]) -> list[TokenLogprobs]:
    """All logprobs of an answer, and of its prompt."""
    return [e for o in outputs for e in (*(o.prompt_logprobs or ()), *(o.logprobs or ()))]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("rule", "kind", "num_samples"),
    [
        ("token", "draft_model", 2400),
        ("block", "draft_model", 2400),
        ("block", "dspark", 1200),
        pytest.param("token", "head", 12_000, marks=pytest.mark.sweep),
        pytest.param("block", "dspark", 12_000, marks=pytest.mark.sweep),
    ],
)
def test_the_joint_over_many_steps_is_the_targets(
    rule: str, kind: str, num_samples: int, tiny_model: Tiny, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 4, "scale": 0.15}
    target = tiny_model("llama", seed=3, num_hidden_layers=2, **sizes)
    draft = tiny_model("llama", seed=4, num_hidden_layers=1, **sizes)
    if kind == "head":
        draft = save_tiny_head(tmp_path, target, boundaries=(0, 1, 2), scale=0.2)
    if kind == "dspark":
        options = {"boundaries": (0, 1, 2), "scale": 0.15, "markov": "vanilla"}
        draft = save_tiny_block_head(tmp_path, target, confidence="token", **options)
    config = engine_config(target, draft, k=K, adaptive=True, max_num_seqs=40, num_pages=1024)
    engine = lagging(config)
    params = SamplingParams(max_tokens=LENGTH, verification=rule)  # type: ignore[arg-type]
    truth, counts = joint(target, PROMPT, params), Counter[tuple[int, ...]]()
    plans = steps_of(engine)
    for first in range(0, num_samples, 40):
        each = [replace(params, seed=seed) for seed in range(first, first + 40)]
        counts.update(tuple(tokens(o)) for o in run(engine, [PROMPT] * 40, each))
    assert total_variation(truth, counts) < bound(len(truth), counts.total())
    assert chi_squared(truth, counts) < 1
    assert {s.num_drafts for plan in plans for s in plan.ranked} == set(range(K))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kind", ["draft_model", "head"])
def test_a_void_step_teaches_nothing(kind: str, tiny_model: Tiny, tmp_path: Path) -> None:
    """A sequence that was preempted draws the same again: no choice may have seen it before."""
    target = tiny_model("llama", seed=0, num_hidden_layers=6)
    draft = draft_of(kind, target, tmp_path, tiny_model)
    sizes = {"num_pages": 30, "max_num_seqs": 6, "max_num_batched_tokens": 16}
    engine = lagging(engine_config(target, draft, k=K, adaptive=True, **sizes))
    plans, adaptive, num_void = steps_of(engine), engine.sequences.adaptive, 0
    assert adaptive is not None
    learn, observe = adaptive.calibrate, adaptive.acceptance.observe

    def calibrated(ranges_np: Any, owns: Any, *others: Any) -> Any:
        nonlocal num_void
        num_void += sum(s.is_void for s in plans[-1].ranked)
        ids = [id(s.request.acceptance) for s in plans[-1].ranked if not s.is_void]
        assert [id(own) for own in owns] == ids
        assert len(ranges_np) == len(ids)
        return learn(ranges_np, owns, *others)

    def observed(wanted: list[int], accepted: list[int], *others: Any, **more: Any) -> None:
        drawn = [s for s in plans[-1].emitting if not s.is_void]
        assert wanted in ([], [s.num_drafts for s in drawn])
        observe(wanted, accepted, *others, **more)

    adaptive.calibrate = calibrated  # type: ignore[method-assign]
    adaptive.acceptance.observe = observed  # type: ignore[method-assign]
    adaptive.observe = functools.partial(AdaptiveSpeculation.observe, adaptive)  # type: ignore[method-assign]
    run(engine, prompts([90, 5, 6, 4, 5, 3], VOCAB), GREEDY)
    assert engine.stats().preemptions > 0
    assert num_void > 0


@pytest.mark.parametrize("kind", ["draft_model", "head"])
def test_looked_up_drafts_keep_their_rows_beside_ranked_ones(
    kind: str, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And drafts that are returned are those that were verified."""
    target = tiny_model("llama", seed=0, num_hidden_layers=6)
    draft = draft_of(kind, target, tmp_path, tiny_model)
    config = engine_config(target, draft, k=K, adaptive=True, max_num_seqs=6)
    given = prompts([5, 9, 30, 17], VOCAB)
    expected = [tokens(each) for each in run(Engine(config), given, GREEDY)]
    monkeypatch.setattr(draws, "stops_early_on", lambda device: False)
    monkeypatch.setattr(loop, "AdaptiveSpeculation", Budgeted)
    engine = without_pauses(lagging(config))
    plans, found = steps_of(engine), [list[RequestOutput]() for _ in given]
    asked = [GREEDY, replace(GREEDY, logprobs=1), GREEDY, GREEDY]
    texts = [[], *expected[1:3], [*expected[3][:5], 1, *expected[3][6:]]]
    engine.submit(
        [
            NewRequest(
                request_id=str(i),
                prompt_token_ids=prompt,
                params=params,
                predicted_token_ids=text,
                returns_drafts=True,
            )
            for i, (prompt, params, text) in enumerate(zip(given, asked, texts, strict=True))
        ]
    )
    while engine.has_work():
        for output in engine.step():
            found[int(output.request_id)].append(output)
    engine.check_integrity()
    assert any(plan.ranked and any(s.is_looked_up for s in plan.scheduled) for plan in plans)
    assert not any(s.is_looked_up for plan in plans for s in plan.ranked)
    for outputs, tokens_of_target in zip(found, expected, strict=True):
        assert tokens(outputs) == tokens_of_target
        drafts = [output.draft_token_ids or [] for output in outputs]
        assert sum(map(len, drafts)) == outputs[-1].num_draft_tokens > 0
        for output, its in zip(outputs[:-1], drafts, strict=False):
            num_accepted = max(0, len(output.token_ids) - 1)
            assert output.token_ids[:num_accepted] == its[:num_accepted]
    stats = engine.stats()
    assert sum(stats.drafted_per_position) == sum(each[-1].num_draft_tokens for each in found)

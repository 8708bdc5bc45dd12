"""k by measured cost in the whole engine, on a clock that the test moves on."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engines import GREEDY, engine_config, prompts
from tiny_models import VOCAB, Tiny

from outrider.engine import learning
from outrider.engine.api import NewRequest, ignore_progress
from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.learning import learn_costs
from outrider.engine.plan import Plan
from outrider.engine.processes import process
from outrider.engine.proposers.suffix import RecentAnswers
from outrider.engine.request import Request

MAX_K = 1  # further drafts would end where the draft model grows unsure


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def charge(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, a_draft_s: float) -> None:
        """A target's pass takes a second, and each drafted position of a sequence so much more."""
        score = engine.worker.scorer.score

        def timed(plan: Plan) -> object:
            self.now_s += 1.0 + a_draft_s * max(plan.num_drafts_np, default=0)
            return score(plan)

        monkeypatch.setattr(engine.worker.scorer, "score", timed)


def drafts_a_step(engine: Engine, between: Callable[[], None] = lambda: None) -> list[int]:
    """Most drafts of a sequence with k left open, step by step."""
    drafted, before = [], 0
    while engine.has_work():
        outputs = [o for o in engine.step() if o.request_id.startswith("open")]
        now = max((o.num_draft_tokens for o in outputs), default=before)
        drafted.append(now - before)
        before = max(before, now)
        between()
        if any(o.finish_reason for o in outputs):
            break
    return drafted


@pytest.fixture
def engine(tiny_model: Tiny) -> Engine:
    """Its draft is its target: every draft is accepted."""
    target = tiny_model("llama", seed=0, max_position_embeddings=512)
    return Engine(engine_config(target, target, k=MAX_K, adaptive=True))


def submit(engine: Engine, name: str, k: int | None, max_tokens: int = 150) -> None:
    params = replace(GREEDY, max_tokens=max_tokens, num_speculative_tokens=k)
    [prompt] = prompts([3], VOCAB, seed=len(name))
    engine.submit([NewRequest(request_id=name, prompt_token_ids=prompt, params=params)])


@pytest.mark.parametrize("a_draft_s", [0.01, 1.5])
def test_the_first_request_is_drafted_for_by_costs_that_were_learned_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, a_draft_s: float
) -> None:
    Clock(monkeypatch).charge(engine, monkeypatch, a_draft_s)
    monkeypatch.setattr(learning, "LEARNING_S", 1e6)
    stages = []
    learn_costs(engine, lambda stage, done, total: stages.append((stage, done, total)))
    assert stages[0] == ("measuring what steps cost", 0, len(stages))
    assert engine.stats() == replace(engine.stats(), steps=0, generation_tokens=0, prompt_tokens=0)
    engine.check_integrity()
    submit(engine, "open", None)
    drafted = drafts_a_step(engine)
    assert drafted[1:41].count(MAX_K) == (40 if a_draft_s < 1 else 0)


def test_nothing_is_learned_if_nothing_drafts(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, k=MAX_K, proposer="none", adaptive=True))
    monkeypatch.setattr(engine, "step", pytest.fail)
    learn_costs(engine)


def test_rows_are_priced_before_the_first_lookup(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, k=MAX_K, proposer="suffix", adaptive=True))
    clock, score = Clock(monkeypatch), engine.worker.scorer.score
    seen: list[tuple[int, ...]] = []

    def timed(plan: Plan) -> object:
        num_rows = sum(s.num_new_tokens + s.num_drafts for s in plan.scheduled)
        clock.now_s += 0.1 + 0.01 * max(0, num_rows - 4)
        seen.extend(tuple(s.request.token_ids[:1]) for s in plan.scheduled)
        return score(plan)

    monkeypatch.setattr(engine.worker.scorer, "score", timed)
    monkeypatch.setattr(learning, "LEARNING_S", 1e6)
    learn_costs(engine)
    assert engine.sequences.adaptive is not None
    price = engine.sequences.adaptive.price
    assert price.of(1, 4) == pytest.approx(price.of(1, 1))
    assert price.of(1, 8) == pytest.approx(1.4 * price.of(1, 1))
    assert len(set(seen)) > 4  # experts are woken by various tokens


def test_what_dummies_say_is_no_recent_answer(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, kept = tiny_model("llama", seed=0), []
    monkeypatch.setattr(RecentAnswers, "add", lambda _, request: kept.append(request.request_id))
    config = engine_config(target, target, k=MAX_K, proposer=("suffix", "draft_model"))
    speculation = replace(config.speculation, suffix_answers_mib=1, adaptive=True)
    engine = Engine(replace(config, speculation=speculation))
    learn_costs(engine)
    submit(engine, "open", None, max_tokens=3)
    while engine.has_work():
        engine.step()
    assert kept == ["open"]


@pytest.mark.parametrize(("device", "learned"), [("cuda:1", ["learned"]), ("cpu", [])])
def test_a_server_learns_costs_at_its_start_if_it_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, learned: list[str]
) -> None:
    """And then leaves all that is loaded out of searches for garbage, which take 0.2 s with it."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("frozen"))
    engine = SimpleNamespace(warm_up_grammars=lambda: None)
    monkeypatch.setattr(learning, "learn_costs", lambda *args: calls.append("learned"))
    monkeypatch.setattr(process, "load_libraries", lambda: lambda config, report: engine)
    config = EngineConfig(target=ModelConfig(path="target"), device=device)
    assert process.load_engine(config, ignore_progress) is engine
    assert calls == [*learned, "frozen"]


def test_learning_costs_ends_in_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.charge(engine, monkeypatch, a_draft_s=0.01)
    begun_s, submit_dummies = [], engine.submit

    def noted(requests: list[NewRequest]) -> None:
        begun_s.append(clock.now_s)
        submit_dummies(requests)

    monkeypatch.setattr(engine, "submit", noted)
    learn_costs(engine)
    assert max(begun_s) <= learning.LEARNING_S
    assert clock.now_s < learning.LEARNING_S + 2
    assert not engine.has_work()
    submit(engine, "open", None)
    assert drafts_a_step(engine).count(MAX_K) > 0


@pytest.mark.parametrize("pinned_k", [0, 1])
def test_drafts_that_pay_are_drawn_beside_a_sequence_that_drafts_as_it_likes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pinned_k: int
) -> None:
    Clock(monkeypatch).charge(engine, monkeypatch, a_draft_s=0.01)
    for i in range(3):
        submit(engine, f"pinned {i}", pinned_k)
    submit(engine, "open", None)
    drafted = drafts_a_step(engine)
    assert drafted[40:].count(MAX_K) > 0.5 * len(drafted[40:])


@pytest.mark.parametrize("lacks", ["pages", "grammar"])
def test_drafts_that_pay_are_drawn_while_a_prompt_cannot_start(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    target = tiny_model("llama", seed=0, max_position_embeddings=512)
    num_pages = 60 if lacks == "pages" else 512
    engine = Engine(engine_config(target, target, k=MAX_K, adaptive=True, num_pages=num_pages))
    Clock(monkeypatch).charge(engine, monkeypatch, a_draft_s=0.01)
    if lacks == "grammar":  # as long as it is being compiled
        monkeypatch.setattr(Request, "can_start", property(lambda r: r.request_id == "open"))
    submit(engine, "open", None)
    engine.step()
    [prompt] = prompts([200], VOCAB)
    engine.submit([NewRequest(request_id="waits", prompt_token_ids=prompt, params=GREEDY)])
    drafted = drafts_a_step(engine)
    assert [r.request_id for r in engine.sequences.waiting] == ["waits"]
    assert drafted[40:].count(MAX_K) > 0.5 * len(drafted[40:])


def test_a_requests_own_k_is_kept_though_no_further_draft_pays(tiny_model: Tiny) -> None:
    target = tiny_model("llama", seed=0, max_position_embeddings=512)
    engine = Engine(engine_config(target, target, k=3))
    engine.scheduler.drafting.least_chance = 1.1
    counts = []
    for name, k in (("pinned", 3), ("open", None)):
        before = engine.stats().drafted_per_position
        submit(engine, name, k, max_tokens=40)
        drafts_a_step(engine)
        counts.append(
            [b - a for a, b in zip(before, engine.stats().drafted_per_position, strict=True)]
        )
    assert counts[0][2] > 0
    assert counts[1][0] > 0
    assert not any(counts[1][1:])


def test_what_lies_between_two_steps_is_part_of_their_cost(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    clock.charge(engine, monkeypatch, a_draft_s=1.5)  # alone they would not pay
    submit(engine, "open", None)

    def send() -> None:
        clock.now_s += 20.0

    assert drafts_a_step(engine, send).count(MAX_K) > 25


def test_idle_time_is_no_steps_cost(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.charge(engine, monkeypatch, a_draft_s=1.5)
    for _ in range(12):
        submit(engine, "open", None, max_tokens=1)
        drafts_a_step(engine)
        clock.now_s += 1e6
    submit(engine, "open", None)
    drafted = drafts_a_step(engine)
    assert drafted.count(0) > 0.8 * len(drafted)

"""A chain of sources drafts once for each sequence; one that fails costs its drafts alone."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributions import bound, chi_squared, total_variation
from engines import (
    GREEDY,
    engine_config,
    generate,
    prompts,
    run,
    sampling_config,
    tokens,
    without_pauses,
)
from heads import save_tiny_head
from target_distribution import joint, sample
from tiny_models import VOCAB, Quick, Tiny

from outrider.engine.api import InvalidRequestError, NewRequest, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.plan import Plan, ScheduledRequest, SourceName
from outrider.engine.proposers.proposer import Counts, Proposer, Source
from outrider.engine.request import Request
from outrider.engine.scheduling.lookups import Worth

K = 3


class Scripted(Source):
    """Says how many drafts there are; `asked` is what it was asked for, call by call."""

    def __init__(self, name: SourceName, says: Callable[[Counts], Counts]) -> None:
        self.name = name
        self.asked: list[Counts] = []
        self._says = says

    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        self.asked.append(wanted)
        return self._says(wanted)


def plan(*max_drafts: int) -> Any:
    """Sequences in slots 10, 11, … and one more, in slot 9, that reads its prompt."""
    request = Request(NewRequest(request_id="0", prompt_token_ids=[1], params=GREEDY))
    common = {"request": request, "source": None}
    reads = SimpleNamespace(slot=9, emits=False, max_drafts=0, max_drawn=0, **common)
    emitting = [
        SimpleNamespace(slot=10 + i, emits=True, max_drafts=k, max_drawn=k, **common)
        for i, k in enumerate(max_drafts)
    ]
    return SimpleNamespace(scheduled=[reads, *emitting], emitting=emitting, concerns_sources=True)


def test_a_sequence_is_drafted_for_by_the_first_source_that_takes_it() -> None:
    first = Scripted("prediction", lambda wanted: {11: 2, 12: 0})
    second = Scripted("draft_model", dict)
    step = plan(3, 3, 3, 0)
    assert Proposer([first, second]).propose(step) == [0, 3, 2, 0, 0]
    assert first.asked == [{10: 3, 11: 3, 12: 3, 13: 0}]
    assert second.asked == [{10: 3, 13: 0}]
    assert [s.source for s in step.emitting] == ["draft_model", "prediction", None, None]


def test_a_source_that_fails_leaves_its_sequences_to_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(wanted: Counts) -> Counts:
        raise RuntimeError("no drafts today")

    step = plan(3, 1)
    chain = Proposer([Scripted("suffix", fail), Scripted("draft_model", dict)])
    assert chain.propose(step) == [0, 3, 1]
    assert chain.propose(plan(3, 1)) == [0, 3, 1]
    assert caplog.text.count("the source suffix failed to draft") == 1
    assert "these go on: draft_model" in caplog.text
    assert Proposer([Scripted("draft_model", fail)]).propose(plan(3, 1)) == [0, 0, 0]


def test_a_source_that_never_follows_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    followed = []

    class Failing(Scripted):
        def follow(self, plan: Plan, scored: Any) -> None:
            raise RuntimeError("out of memory")

    class Noting(Scripted):
        def follow(self, plan: Plan, scored: Any) -> None:
            followed.append(plan)

    chain, step = Proposer([Failing("draft_model", dict), Noting("suffix", dict)]), plan(1)
    for _ in range(3):
        chain.follow(step, SimpleNamespace())  # type: ignore[arg-type]
    assert followed == [step] * 3
    assert caplog.text.count("the source draft_model failed to draft") == len(caplog.records) == 1


def test_a_source_hears_of_the_end_of_those_sequences_that_it_may_draft_for() -> None:
    ended: list[tuple[str, str]] = []

    class Noting(Scripted):
        def forget(self, request: Request) -> None:
            ended.append((self.name, request.request_id))

    chain = Proposer([Noting("suffix", dict), Noting("draft_model", dict)])
    for name, sources in (("all", None), ("none", ()), ("one", ("draft_model",))):
        new = NewRequest(request_id=name, prompt_token_ids=[1], params=GREEDY, sources=sources)
        chain.forget(Request(new))
    assert ended == [("suffix", "all"), ("draft_model", "all"), ("draft_model", "one")]


EVERY = ("prediction", "suffix", "draft_model")


@pytest.mark.parametrize("lag", [0, 1])
def test_looked_up_and_drawn_drafts_alternate(tiny_model: Tiny, lag: int) -> None:
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    engine = Engine(engine_config(target, draft, k=K, proposer=EVERY))
    engine.scheduler.lag = lag
    seen = []
    propose = engine.worker.proposer.propose

    def noted(plan: Plan) -> list[int]:
        counts = propose(plan)
        seen.extend(s.source for s, k in zip(plan.scheduled, counts, strict=True) if k)
        return counts

    engine.worker.proposer.propose = noted  # type: ignore[method-assign]
    different = prompts([9, 20, 3], VOCAB)
    assert [tokens(o) for o in run(engine, different, GREEDY)] == [
        generate(target, prompt, GREEDY.max_tokens) for prompt in different
    ]
    assert "draft_model" in seen
    assert lag == 1 or "suffix" in seen  # behind a model's drafts in flight it must be sure


@pytest.mark.parametrize(
    ("rule", "drafter", "lag"), [("token", "draft_model", 0), ("block", "head", 1)]
)
def test_the_joint_of_all_sources_in_one_batch_is_the_targets(
    rule: str, drafter: str, lag: int, quick_model: Quick, tmp_path: Path
) -> None:
    target, draft = quick_model(3, 2), quick_model(4)
    if drafter == "head":
        options = {"boundaries": (0, 1, 2), "draft_vocab": 3, "scale": 0.2}
        draft = save_tiny_head(tmp_path, target, **options)
    engine = Engine(sampling_config(target, draft, EVERY))
    engine.scheduler.lag = lag
    used = Counter[str | None]()
    propose = engine.worker.proposer.propose

    def noted(step: Plan) -> list[int]:
        counts = propose(step)
        used.update(s.source for s, k in zip(step.scheduled, counts, strict=True) if k)
        return counts

    engine.worker.proposer.propose = noted  # type: ignore[method-assign]
    # Lookups would soon be known not to pay in such a text.
    free = Worth(1, 1e-6)
    engine.scheduler.drafting.worth = lambda: free  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=4, verification=rule)  # type: ignore[arg-type]
    truth = joint(target, [2, 0, 3, 2], params)
    counts = sample(
        engine,
        [2, 0, 3, 2],
        params,
        max_k=3,
        n=2400,
        predicted=([], [1, 3, 0, 0, 2, 1, 1, 2, 2, 3, 3, 1]),
        sources=(None, ("suffix",), ("draft_model",), ("prediction",), ()),
    )
    assert total_variation(truth, counts) < bound(len(truth), 2400)
    assert chi_squared(truth, counts) < 1
    assert all(used[name] > 50 for name in EVERY)


def test_a_request_has_the_drafts_of_the_sources_that_it_names(tiny_model: Tiny) -> None:
    target = tiny_model("llama", seed=0)
    engine = without_pauses(Engine(engine_config(target, target, k=K, proposer=EVERY)))
    text = prompts([9], VOCAB)[0]
    truth = generate(target, text, GREEDY.max_tokens)
    named: list[tuple[str, ...]] = [("prediction",), ("suffix",), ("draft_model",), ()]
    outputs = run(engine, [text] * 4, GREEDY, [truth] * 4, named)
    assert [tokens(each) for each in outputs] == [truth] * 4
    sources = [{output.source for output in each} - {None} for each in outputs]
    assert sources == [{"prediction"}, {"suffix"}, {"draft_model"}, set()]


def test_a_source_that_is_not_there_is_refused_by_name(tiny_model: Tiny) -> None:
    engine = Engine(engine_config(tiny_model("llama", seed=0), proposer="suffix"))
    says = "speculation.sources: 'medusa' is no source here; this server has prediction, suffix"
    with pytest.raises(InvalidRequestError, match=says):
        run(engine, [[1, 2]], GREEDY, sources=[("suffix", "medusa")])
    with pytest.raises(InvalidRequestError, match="'draft_model' is no source here"):
        run(engine, [[1, 2]], GREEDY, sources=[("draft_model",)])
    with pytest.raises(ValueError, match="unknown source of drafts 'medusa'; known: prediction, g"):
        Engine(engine_config(tiny_model("llama", seed=0), proposer="medusa"))
    config = engine_config(tiny_model("llama", seed=0), proposer=EVERY)
    speculation = replace(config.speculation, sources=EVERY)
    with pytest.raises(ValueError, match="the source draft_model needs a draft"):
        Engine(replace(config, speculation=speculation))


def test_who_expects_more_accepted_drafts_drafts(tiny_model: Tiny) -> None:
    """A text that has agreed with one token gives way to a good model, but not to a bad one."""
    target = tiny_model("llama", seed=0)
    engine = without_pauses(Engine(engine_config(target, target, k=K, proposer=EVERY)))
    drafting = engine.scheduler.drafting
    request = Request(NewRequest(request_id="0", prompt_token_ids=[1, 2, 3, 1, 2], params=GREEDY))
    request.slot = 0
    for by_position, source in ((0.95, None), (0.1, "suffix")):
        engine.sequences.acceptance.by_position[:] = [by_position] * K
        scheduled = ScheduledRequest(request, 5)
        drafting.worth = lambda: Worth(1, 0.05)  # type: ignore[method-assign]
        drafting.set_drafts(scheduled, K, 32)
        assert (scheduled.wish and scheduled.wish.source) == source

"""A chain of sources drafts once for each sequence; one that fails costs its drafts alone."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributions import bound, chi_squared, total_variation
from engines import GREEDY, engine_config, generate, prompts, run, sampling_config, tokens
from target_distribution import joint, sample
from tiny_models import VOCAB, Tiny

from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.proposers.lookup import Lookup
from outrider.engine.proposers.ngram import NgramLookup
from outrider.engine.proposers.proposer import Counts, Proposer, Source
from outrider.engine.scheduling.plan import Plan, SourceName

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
    reads = SimpleNamespace(slot=9, draws=False, max_drafts=0, max_drawn=0, source=None)
    drawing = [
        SimpleNamespace(slot=10 + i, draws=True, max_drafts=k, max_drawn=k, source=None)
        for i, k in enumerate(max_drafts)
    ]
    return SimpleNamespace(scheduled=[reads, *drawing], drawing=drawing)


def test_a_sequence_is_drafted_for_by_the_first_source_that_takes_it() -> None:
    first = Scripted("prediction", lambda wanted: {11: 2, 12: 0})
    second = Scripted("draft_model", dict)
    step = plan(3, 3, 3, 0)
    assert Proposer([first, second]).propose(step) == [0, 3, 2, 0, 0]
    assert first.asked == [{10: 3, 11: 3, 12: 3, 13: 0}]
    assert second.asked == [{10: 3, 13: 0}]
    assert [s.source for s in step.drawing] == ["draft_model", "prediction", None, None]


def test_a_source_that_fails_leaves_its_sequences_to_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(wanted: Counts) -> Counts:
        raise RuntimeError("no drafts today")

    step = plan(3, 1)
    assert Proposer([Scripted("ngram", fail), Scripted("draft_model", dict)]).propose(step) == [
        0,
        3,
        1,
    ]
    assert "the source ngram failed" in caplog.text
    assert Proposer([Scripted("draft_model", fail)]).propose(plan(3, 1)) == [0, 0, 0]


def with_lookup(engine: Engine) -> Engine:
    """Prompt lookup drafts where it finds something, and else what drafted before."""
    worker = engine.worker
    lookup = Lookup("ngram", lambda _: NgramLookup(1, 4), worker.slots)
    worker.proposer.sources.insert(1, lookup)
    return engine


@pytest.mark.parametrize("lag", [0, 1])
def test_looked_up_and_drawn_drafts_alternate(tiny_model: Tiny, lag: int) -> None:
    target = tiny_model("llama", seed=0)
    engine = with_lookup(Engine(engine_config(target, target, k=K)))
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
    assert lag == 1 or "ngram" in seen  # behind a model's drafts in flight it must be sure


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_joint_of_a_chain_is_the_targets(rule: str, tiny_model: Callable[..., Path]) -> None:
    shape = {"vocab_size": 4, "scale": 0.15, "num_hidden_layers": 1}
    target, draft = tiny_model("llama", seed=3, **shape), tiny_model("llama", seed=4, **shape)
    engine = with_lookup(Engine(sampling_config(target, draft, "draft_model")))
    params = SamplingParams(max_tokens=4, verification=rule)  # type: ignore[arg-type]
    truth = joint(target, [2, 0, 3], params)
    counts = sample(engine, [2, 0, 3], params, max_k=3, n=2400)
    assert total_variation(truth, counts) < bound(len(truth), 2400)
    assert chi_squared(truth, counts) < 1

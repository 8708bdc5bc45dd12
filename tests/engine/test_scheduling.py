"""Who is seated, and what a refused or finished request leaves behind: nothing."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from logits_processors import FavourParity
from tiny_models import VOCAB
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.api import (
    InvalidRequestError,
    NewRequest,
    ProcessorChoice,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from outrider.engine.engine import Engine
from outrider.engine.memory.sequence import SequenceMemory
from outrider.engine.models.network import Pass
from outrider.engine.plan import Plan
from outrider.engine.request import Request
from outrider.engine.worker import LaunchedStep

SPECS = ("parity = logits_processors:FavourParity", "keep_to = logits_processors:KeepTo")
LONG, SHORT, OTHER = prompts([120, 6, 7], VOCAB)


def new(name: str, prompt: list[int], params: SamplingParams = GREEDY) -> NewRequest:
    return NewRequest(request_id=name, prompt_token_ids=prompt, params=params)


def steps_until_first_token(engine: Engine, names: set[str]) -> dict[str, int]:
    """Runs to the end."""
    first: dict[str, int] = {}
    num_steps = 0
    while engine.has_work():
        num_steps += 1
        for output in engine.step():
            if output.token_ids:
                first.setdefault(output.request_id, num_steps)
    engine.check_integrity()
    assert first.keys() >= names
    return first


def test_samples_that_wait_for_their_prompt_keep_no_seat_from_others(target: Path) -> None:
    engine = Engine(engine_config(target, max_num_seqs=4, max_num_batched_tokens=32))
    engine.submit([new(f"sample {i}", LONG) for i in range(4)])
    engine.submit([new("short", SHORT), new("other", OTHER)])
    first = steps_until_first_token(engine, {"short", "other"})
    # The prompt takes four steps and more; all rows of the first are its own.
    assert first["short"] <= 2
    assert first["other"] <= 2
    assert first["sample 0"] <= 5
    assert first["sample 3"] <= first["sample 0"] + 1 + GREEDY.max_tokens


def test_a_prompt_in_chunks_leaves_rows_to_short_ones_and_goes_on(target: Path) -> None:
    engine = Engine(engine_config(target, max_num_seqs=8, max_num_batched_tokens=32))
    engine.submit([new("long", LONG)])
    engine.step()
    shorts = prompts([9] * 6, VOCAB, seed=1)
    engine.submit([new(str(i), prompt) for i, prompt in enumerate(shorts)])
    first = steps_until_first_token(engine, {"0", "5"})
    assert first["0"] == 1
    assert first["long"] <= 8  # it keeps half of the rows at least


def test_long_prompts_come_one_after_another(target: Path) -> None:
    engine = Engine(engine_config(target, max_num_seqs=4, max_num_batched_tokens=32))
    engine.submit([new(str(i), prompt) for i, prompt in enumerate(prompts([96] * 3, VOCAB))])
    first = steps_until_first_token(engine, {"0", "1", "2"})
    assert first["0"] == 3  # as if it were alone


def test_a_prompt_that_does_not_fit_yet_takes_no_pages(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(replace(engine_config(target, num_pages=40), max_model_len=144))
    run(engine, [LONG], replace(GREEDY, max_tokens=1))
    engine.submit([new("running", SHORT, replace(GREEDY, max_tokens=60))])
    for _ in range(40):
        engine.step()
    engine.submit([new("waiting", LONG)])
    attached: list[SequenceMemory] = []
    attach = engine.sequences.memory.attach_prefix

    def watched(memory: SequenceMemory, *args: int) -> int:
        attached.append(memory)
        return attach(memory, *args)

    monkeypatch.setattr(engine.sequences.memory, "attach_prefix", watched)
    first = steps_until_first_token(engine, {"waiting"})
    assert first["waiting"] > 10
    assert len(attached) == 1


def test_a_sequence_that_is_preempted_for_another_leaves_the_step(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With so many, it is the urgent sequence that finds none left.
    engine = Engine(replace(engine_config(target, num_pages=10), max_model_len=32))
    launch = engine.worker.launch

    def checked(plan: Plan) -> LaunchedStep:
        assert all(scheduled.request.slot == scheduled.slot for scheduled in plan.scheduled)
        return launch(plan)

    monkeypatch.setattr(engine.worker, "launch", checked)
    engine.submit([new("planned first", SHORT)])
    engine.step()
    engine.submit([replace(new("urgent", OTHER[:5]), priority=-1)])
    steps_until_first_token(engine, {"planned first", "urgent"})
    assert engine.stats().preemptions > 0


def test_more_sequences_than_may_ever_wait_are_refused_for_good(target: Path) -> None:
    engine = Engine(engine_config(target, max_num_seqs=2, max_queue_len=1))
    with pytest.raises(InvalidRequestError, match=r"^n: the 4 sequences .* 3 may run or wait"):
        engine.submit([new(str(i), SHORT) for i in range(4)])
    assert not engine.has_work()


@pytest.mark.parametrize("fails", ["processor", "queueing", "queue"])
def test_a_submission_that_fails_leaves_nothing_behind(
    target: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    config = engine_config(target, max_num_seqs=2, max_queue_len=2)
    engine = Engine(replace(config, logits_processors=SPECS))
    good = replace(GREEDY, logits_processors=(ProcessorChoice("parity"),))
    bad = replace(GREEDY, logits_processors=(ProcessorChoice("parity", {"bias": 2, "no": 1}),))
    engine.submit([new("before", SHORT)])
    group = [new("group 0", SHORT, good), new("group 1", SHORT, good)]
    if fails == "processor":
        group[1] = new("group 1", SHORT, bad)
    elif fails == "queue":
        group += [new("group 2", SHORT, good), new("group 3", SHORT, good)]
    with monkeypatch.context() as patch:
        if fails == "queueing":
            patch.setattr(engine.sequences, "add", _raise)
        with pytest.raises((InvalidRequestError, QueueFullError, RuntimeError)):
            engine.submit(group)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is FavourParity]
    assert engine.stats().num_waiting == 1
    engine.submit([new("group 0", SHORT)])  # the name is free
    names: set[str] = set()
    while engine.has_work():
        names |= {output.request_id for output in engine.step()}
    assert names == {"before", "group 0"}


def _raise(requests: list[Request]) -> None:
    raise RuntimeError("no room today")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("ends", ["finished", "aborted"])
def test_nothing_of_a_sequence_lives_on(target: Path, draft: Path, ends: str, lag: int) -> None:
    """Neither in its seat nor in a step that is in flight."""
    config = engine_config(target, draft, max_num_seqs=2)
    engine = Engine(replace(config, logits_processors=SPECS))
    engine.scheduler.lag = lag
    params = replace(GREEDY, max_tokens=4, logits_processors=(ProcessorChoice("parity"),))
    engine.submit([new("gone", SHORT, params)])
    engine.step()
    if ends == "aborted":
        engine.abort(["gone"])
    while engine.has_work():
        engine.step()
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) in (Request, FavourParity)]
    assert alive == []


def test_an_error_behind_a_rejected_draft_is_not_reported_for_a_later_failure(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(engine_config(target, draft, k=3), logits_processors=SPECS)
    [truth] = run(Engine(config), [SHORT], GREEDY)
    # Fails behind every token that the target would not have drawn.
    choice = ProcessorChoice("keep_to", {"token_ids": SHORT + tokens(truth)})
    params = replace(GREEDY, logits_processors=(choice,))
    engine = Engine(config)
    [outputs] = run(engine, [SHORT], params)
    assert tokens(outputs) == tokens(truth)
    assert outputs[-1].num_accepted_tokens < outputs[-1].num_draft_tokens  # some were rejected

    engine.submit([new("0", SHORT, params)])
    seen: list[RequestOutput] = []
    while len(tokens(seen)) < 18:
        seen += engine.step()
    score = engine.worker.scorer.score

    def broken(plan: Plan) -> Pass:
        scored = score(plan)
        return scored._replace(logits=torch.full_like(scored.logits, torch.nan))

    monkeypatch.setattr(engine.worker.scorer, "score", broken)
    while engine.has_work():
        seen += engine.step()
    assert seen[-1].finish_reason == "error"
    assert "keep_to" not in (seen[-1].error or "")


@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_a_match_sequence_gets_the_same_tokens_whatever_cuts_its_drafts(
    target: Path, draft: Path, proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded = SamplingParams(max_tokens=30, temperature=0.9, seed=5, verification="match")
    of_proposer = draft if proposer == "draft_model" else None
    config = engine_config(target, of_proposer, proposer=proposer, k=4)
    [alone] = run(Engine(config), [SHORT], seeded)
    others = [replace(GREEDY, max_tokens=40)] * 3
    crowd = [LONG[:40], OTHER, LONG[40:70]]

    few_rows = engine_config(
        target, of_proposer, proposer=proposer, k=4, max_num_batched_tokens=6, max_num_seqs=4
    )
    few_pages = engine_config(target, of_proposer, proposer=proposer, k=4, num_pages=28)
    drafted = {alone[-1].num_draft_tokens}
    for crowded in (few_rows, few_pages):
        engine = Engine(replace(crowded, max_model_len=100))
        outputs = run(engine, [*crowd, SHORT], [*others, seeded])
        assert tokens(outputs[-1]) == tokens(alone)
        drafted.add(outputs[-1][-1].num_draft_tokens)
    assert proposer == "suffix" or len(drafted) > 1

    engine = Engine(config)
    source = engine.worker.proposer.sources[-1]
    propose, counted = source.propose, iter(range(10**6))

    def failing(plan: Plan, wanted: dict[int, int]) -> dict[int, int]:
        if next(counted) % 2 == 0:
            raise RuntimeError("no drafts")
        return propose(plan, wanted)

    monkeypatch.setattr(source, "propose", failing)
    [outputs] = run(engine, [SHORT], seeded)
    assert tokens(outputs) == tokens(alone)


class CountOperations(TorchDispatchMode):
    """How many operations torch is asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_newcomers_are_uploaded_at_once(target: Path) -> None:
    counts = []
    for num_newcomers in (2, 8):
        engine = Engine(engine_config(target, max_num_seqs=8))
        different = prompts(range(4, 4 + num_newcomers), VOCAB)
        engine.submit([new(str(i), prompt) for i, prompt in enumerate(different)])
        with CountOperations() as operations:
            plan = engine.scheduler.schedule()
            assert len(plan.newcomers) == num_newcomers
            engine.worker.slots.fill(plan.newcomers, plan.newcomers)
        assert len(engine.sequences.free_slots) == 8 - num_newcomers
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0

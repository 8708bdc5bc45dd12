"""Looked-up drafts are as many as are worth their rows, whatever k is for a model's."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, repeat
from math import inf
from operator import mul
from types import SimpleNamespace

import pytest
from engines import GREEDY, engine_config, lagging, prompts, run, tokens
from tiny_models import VOCAB, Tiny

from outrider.engine.acceptance import Hits, OwnAcceptance, OwnHits
from outrider.engine.api import NewRequest
from outrider.engine.engine import Engine
from outrider.engine.plan import Plan
from outrider.engine.proposers.lookup import Found, Lookup
from outrider.engine.request import Request
from outrider.engine.scheduling.adaptive_speculation import AdaptiveSpeculation
from outrider.engine.scheduling.lookups import Worth
from outrider.engine.scheduling.price import MIN_TIMES
from outrider.engine.state.slots import Slots
from outrider.engine.worker import LaunchedStep

PROMPT = prompts([9], VOCAB)[0]
LONG = replace(GREEDY, max_tokens=40)


def rate(num_tokens: float, row_cost: float, chances: list[float]) -> float:
    return (num_tokens + sum(chances)) / (1 + row_cost * len(chances))


def test_as_many_drafts_are_taken_as_raise_the_rate_most() -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_tokens, row_cost = rng.uniform(1, 64), rng.uniform(0, 0.3)
        acceptance, num_assumed, most = rng.uniform(0.05, 1), rng.randint(0, 9), rng.randint(0, 32)
        chances = list(accumulate(repeat(acceptance, num_assumed + most), mul))[num_assumed:]
        taken, gain = Worth(num_tokens, row_cost).best(chances[:most])
        best = max(range(most + 1), key=lambda n: rate(num_tokens, row_cost, chances[:n]))
        assert taken == best
        assert gain == pytest.approx(sum(chances[:best]))


def falling(acceptance: float) -> list[float]:
    return [acceptance**j for j in range(1, 33)]


def test_what_others_have_taken_counts() -> None:
    shared = Worth(2, 0.1)
    shared.take(*shared.best(falling(0.98)))
    assert Worth(2, 0.1).best(falling(0.8))[0] > shared.best(falling(0.8))[0] > 0


def test_a_text_is_trusted_for_what_agrees_and_for_what_has_come_true() -> None:
    hits, own = Hits(), OwnHits()
    assert hits.chance(1) == pytest.approx(2 / 3)
    assert hits.chance(32) == pytest.approx(33 / 34)
    own.observe(20, 20)
    assert own.chance(1, 2 / 3) == pytest.approx(22 / 23)
    for _ in range(20):
        own.observe(8, 0)
    assert own.chance(2, 3 / 4) < 0.1 < 0.2 < own.chance(32, 33 / 34)
    for _ in range(20):
        own.observe(8, 8)
    assert own.chance(2, 3 / 4) > 0.85  # what was long ago is forgotten
    for _ in range(1000):
        hits.observe(2, 1, 0)
    assert hits.chance(3) < 0.02 < 0.8 < hits.chance(4)
    for _ in range(1000):
        hits.observe(2, 4, 3)
    assert hits.chance(2) == pytest.approx(0.75, abs=0.05)


class Scripted:
    """A text that always expects the same; `looked` gets behind how many tokens it was asked."""

    def __init__(self, looked: list[int]) -> None:
        self.looked = looked

    def find(self, token_ids: list[int], num_tokens: int) -> Found | None:
        self.looked.append(len(token_ids))
        return Found([7] * num_tokens, 2)


def test_a_source_learns_from_what_it_finds_though_nobody_drafts_it() -> None:
    """So it drafts nothing where nothing comes true, and soon again where something does."""
    source = Lookup("suffix", lambda _: Scripted([]), None, most_pause=0)  # type: ignore[arg-type]

    def asked(tokens: list[int]) -> list[int]:
        """How many drafts pay, step after step, of a sequence that gets these tokens."""
        new = NewRequest(request_id="0", prompt_token_ids=[1, 2], params=GREEDY)
        request, counts = Request(new), []
        for token_id in tokens:
            wish = source.wish(request)
            assert wish is not None
            counts.append(Worth(1, 0.1).best(wish.chances)[0])
            request.token_ids.append(token_id)
        return counts

    assert asked([8] * 20)[0] > 0 == asked([8] * 100)[-1]
    assert not any(asked([8] * 20))  # another sequence need not find out again
    counts = asked([8] * 10 + [7] * 20)
    assert counts[10] == 0 < counts[-1]


def test_lookups_that_bring_nothing_pause_longer_and_longer() -> None:
    """They take time of the host, which a step of a small model has none to spare."""
    looked: list[int] = []

    source = Lookup("suffix", lambda _: Scripted(looked), None)  # type: ignore[arg-type]

    def places(num_tokens: int, drafted: Sequence[int] = ()) -> list[int]:
        """Behind how many tokens of an answer it was looked up."""
        looked.clear()
        new = NewRequest(request_id="0", prompt_token_ids=[1], params=GREEDY)
        request = Request(new)
        for at in range(num_tokens):
            wish = source.wish(request)
            if at in drafted:
                scheduled = SimpleNamespace(request=request, wish=wish, max_drafts=0)
                source.propose(SimpleNamespace(emitting=[scheduled]), {})  # type: ignore[arg-type]
            request.token_ids.append(8)
        source.forget(request)
        return [known - 1 for known in looked]

    source._slots = SimpleNamespace(write_drafts=lambda found: None)  # type: ignore[assignment]
    first = places(200)
    assert first[:6] == [0, 2, 4, 6, 9, 13]
    assert len(first) < 20
    assert first[-1] - first[-2] == 32
    for _ in range(20):
        places(200)
    begun = [places(8) for _ in range(32)]  # another sequence need not find out again
    assert 7 <= sum(map(bool, begun)) <= 9
    useful = places(200, range(200))
    assert useful == [*range(useful[0], 200)]
    assert places(200)[:3] == [0, 1, 3]  # and soon forgets it where lookups are of use


def test_the_more_sequences_there_are_the_longer_each_pauses() -> None:
    """So a step has few lookups in vain, however many sequences it has."""
    found: list[int] = []

    def lookups_a_step(num_seqs: int) -> float:
        source = Lookup("suffix", lambda _: Scripted(found), None)  # type: ignore[arg-type]
        new = NewRequest(request_id="0", prompt_token_ids=[1], params=GREEDY)
        requests = [Request(new) for _ in range(num_seqs)]
        for step in range(1200):
            if step == 1000:
                found.clear()
            for request in requests:
                source.wish(request)
                request.token_ids.append(8)
        return len(found) / 200

    assert lookups_a_step(20) < 0.5
    assert lookups_a_step(100) < 0.5


@pytest.mark.parametrize("needs_host", [False, True])
def test_without_a_hit_steps_are_those_of_plain_decoding(
    tiny_model: Tiny, needs_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the step in flight, and no row and no write is for drafts."""

    def steps_of(*sources: str) -> list[list[int]]:
        config = engine_config(tiny_model("llama", seed=0), proposer=sources, k=2)
        speculation = replace(config.speculation, suffix_min_tokens=32)
        engine = lagging(replace(config, speculation=speculation))
        rows, launch = [], engine.worker.launch

        def launched(plan: Plan) -> LaunchedStep:
            step = launch(plan)
            rows.append([s.num_new_tokens + s.num_drafts for s in plan.scheduled])
            return step

        monkeypatch.setattr(engine.worker, "launch", launched)
        monkeypatch.setattr(Slots, "write_drafts", lambda _, drafts: rows.extend(drafts))
        for i, prompt in enumerate(prompts([9, 20, 3], VOCAB)):
            engine.submit([NewRequest(request_id=str(i), prompt_token_ids=prompt, params=GREEDY)])
            engine.sequences.by_id[str(i)].needs_host = needs_host
        while engine.has_work():
            assert not engine.scheduler.must_know()
            engine.step()
        return rows

    assert steps_of("prediction", "suffix") == steps_of()


def test_their_rows_are_priced_and_teach_nothing_else() -> None:
    adaptive = AdaptiveSpeculation(3)
    guessed = adaptive.worth(2).best(falling(0.9))
    assert 0 < guessed[0] < 32
    for num_rows in (2, 4, 8) * 5:  # another row for both takes a fiftieth of a step
        adaptive.price.observe(2, num_rows, 0, 0.98 + 0.01 * num_rows, is_usual=False)
    taught = adaptive.acceptance.expected(3), adaptive.price.of(2, 8, 3)
    priced = adaptive.worth(2).best(falling(0.9))
    assert priced[0] == Worth(2, 0.01).best(falling(0.9))[0] > guessed[0]
    for _ in range(40):
        adaptive.observe(2, [0], [0], 9.0, num_looked_up=8)
    assert (adaptive.acceptance.expected(3), adaptive.price.of(2, 8, 3)) == taught
    dear = adaptive.worth(2)
    dear.take(*dear.best(falling(0.9)))
    assert not dear.pays
    for _ in range(1000):  # what was dear once is tried again
        adaptive.observe(2, [0, 0], [0, 0], 1.0)
    cheap = adaptive.worth(2)
    cheap.take(*cheap.best(falling(0.9)))
    assert cheap.pays


def test_a_step_has_drafts_only_if_they_are_worth_what_having_any_costs() -> None:
    adaptive = AdaptiveSpeculation(3)
    for num_rows in (4, 12, 20, 68) * 3:
        adaptive.price.observe(4, num_rows, 0, 0.96 + 0.01 * num_rows, is_usual=False)
    for num_drafts in (8, 16, 64) * 4:  # having any takes a quarter of a step
        adaptive.observe(4, [], [], 1.25 + 0.01 * num_drafts, num_looked_up=num_drafts)
    alone, together = adaptive.worth(4), adaptive.worth(4)
    count, gain = alone.best([0.5, 0.4])
    assert count == 2  # the rows themselves would pay
    alone.take(count, gain)
    assert not alone.pays
    for _ in range(4):
        together.take(*together.best([0.5, 0.4]))
    assert together.pays


def test_drafts_that_do_not_pay_together_are_left_out(tiny_model: Tiny) -> None:
    engine = Engine(engine_config(tiny_model("llama", seed=0), proposer="suffix", k=2))
    for any_cost, has_drafts in ((0.0, True), (1e6, False)):
        worth = Worth(1, 0.01, any_cost)  # of all steps
        engine.scheduler.drafting.worth = lambda worth=worth: worth  # type: ignore[method-assign]
        [outputs] = run(engine, [[1, 2, 3] * 6], GREEDY, [[1, 2, 3] * 20])
        assert (outputs[-1].num_draft_tokens > 0) == has_drafts


def _worth(num_seqs: int) -> Worth:
    """As if rows had been measured to be cheap: a busy machine may measure anything."""
    return Worth(num_seqs, 0.01)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_right_prediction_takes_few_steps_where_the_model_does_not_draft(
    tiny_model: Tiny, lag: int
) -> None:
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    engine = Engine(engine_config(target, draft, k=2, adaptive=True))
    engine.scheduler.lag = lag
    adaptive = engine.sequences.adaptive
    assert adaptive is not None
    adaptive.choose = lambda _, owns, *args, **options: [0] * len(owns)  # type: ignore[method-assign]
    adaptive.worth = _worth  # type: ignore[method-assign]
    [plain] = run(engine, [PROMPT], LONG)
    assert len(plain) == 40
    [outputs] = run(engine, [PROMPT], LONG, [tokens(plain)])
    assert tokens(outputs) == tokens(plain)
    assert len(outputs) <= 8
    [outputs] = run(engine, [PROMPT], replace(LONG, num_speculative_tokens=1), [tokens(plain)])
    assert len(outputs) <= 8  # a k that is named is of the model's drafts, too
    [outputs] = run(engine, [PROMPT], replace(LONG, num_speculative_tokens=0), [tokens(plain)])
    assert len(outputs) == 40


@pytest.mark.parametrize("num_tried", [0, 2])
def test_predictions_are_drafted_again_right_behind_drafts_of_the_model(
    tiny_model: Tiny, num_tried: int
) -> None:
    """Many that wait for such a step have not looked in vain, or each would pause for long."""
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 512}
    engine = lagging(engine_config(target, draft, k=1, adaptive=True, **sizes))
    adaptive = engine.sequences.adaptive
    assert adaptive is not None
    steps = iter(range(1000))

    speedups: list[float] = []

    def choose(_: int, owns: list[OwnAcceptance], *args: object, **options: float) -> list[int]:
        speedups.append(options["speedup"])
        adaptive.k = int(2 <= next(steps) < 2 + num_tried)
        adaptive.is_measuring = adaptive.k > 0
        return [adaptive.k] * len(owns)

    some = prompts([9] * 12, VOCAB)
    params = replace(LONG, temperature=1.0, verification="match")  # so that nothing repeats
    plain = run(engine, some, replace(params, num_speculative_tokens=0))
    adaptive.choose = choose  # type: ignore[method-assign]
    adaptive.worth = lambda num_seqs: Worth(num_seqs, 1e-6)  # type: ignore[method-assign]
    num_before = engine.stats().steps
    outputs = run(engine, some, params, [tokens(each) for each in plain])
    assert [tokens(each) for each in outputs] == [tokens(each) for each in plain]
    assert speedups[:2] == [1.0, inf]  # before the first step that looks up nobody knows
    assert speedups[2] > 5
    waits = int(num_tried > 0)  # a step, until the drafts of the last one are known
    assert engine.stats().steps - num_before <= 3 + num_tried + waits


def test_a_few_drafts_are_left_out_where_a_step_is_padded_for_them() -> None:
    adaptive, chances = AdaptiveSpeculation(3), [0.99] * 32
    adaptive.price.padding = lambda num_seqs, num_rows: (num_seqs, -(-num_rows // 64) * 64)
    for num_rows in (64, 128, 192) * MIN_TIMES:
        adaptive.price.observe(2, num_rows, 0, num_rows / 64, is_usual=False)

    def left_out(num_rows: int, *each: list[float]) -> int:
        return adaptive.num_left_out(2, num_rows, 2 + sum(map(sum, each)), each)

    assert left_out(66, chances, chances) == 1
    assert left_out(67, chances, chances) == 2
    assert left_out(64, chances, chances) == 0
    assert left_out(100, chances, chances) == 0  # more are worth the padding
    assert left_out(70, chances, [0.9] * 3) == 4  # the other one has no more than two to give
    assert left_out(66, [0.9], [0.9]) == 0


def test_steps_of_right_predictions_leave_out_as_many_as_pays(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    config = engine_config(target, draft, k=1, adaptive=True, max_num_batched_tokens=512)
    engine = lagging(config)
    some = prompts([9, 9], VOCAB)
    params = replace(GREEDY, max_tokens=120, temperature=1.0, verification="match")
    plain = run(engine, some, replace(params, num_speculative_tokens=0))
    adaptive, launch, rows = engine.sequences.adaptive, engine.worker.launch, []
    assert adaptive is not None
    adaptive.choose = lambda _, owns, *args, **options: [0] * len(owns)  # type: ignore[method-assign]
    adaptive.worth = lambda num_seqs: Worth(num_seqs, 1e-6)  # type: ignore[method-assign]

    def num_left_out(
        num_seqs: int, num_rows: int, num_tokens: float, chances: list[list[float]]
    ) -> int:
        assert num_tokens == pytest.approx(num_seqs + sum(map(sum, chances)))
        assert num_rows == num_seqs + sum(map(len, chances))
        return 1 if num_rows == 66 else 0

    adaptive.num_left_out = num_left_out  # type: ignore[method-assign, assignment]

    def launched(plan: Plan) -> LaunchedStep:
        step = launch(plan)
        rows.append(sum(s.num_new_tokens + s.num_drafts for s in plan.scheduled))
        return step

    monkeypatch.setattr(engine.worker, "launch", launched)
    outputs = run(engine, some, params, [tokens(each) for each in plain])
    assert [tokens(each) for each in outputs] == [tokens(each) for each in plain]
    assert rows.count(64) == 3
    assert max(rows) == 64


def test_costs_are_learned_though_every_step_could_look_drafts_up(tiny_model: Tiny) -> None:
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    config = engine_config(target, draft, k=2, adaptive=True)
    params = replace(GREEDY, max_tokens=200)
    [plain] = run(Engine(config), [PROMPT], replace(params, num_speculative_tokens=0))
    engine = Engine(config)
    adaptive = engine.sequences.adaptive
    assert adaptive is not None
    adaptive.worth = _worth  # type: ignore[method-assign]
    [outputs] = run(engine, [PROMPT], params, [tokens(plain)])
    assert tokens(outputs) == tokens(plain)
    assert adaptive.price.knows(1, 1)
    sources = [output.source for output in outputs]
    assert sources.count("prediction") > 4
    assert sources.count("prediction") + 3 * (MIN_TIMES + 2) >= len(sources)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_wrong_prediction_stops_being_drafted(tiny_model: Tiny, lag: int) -> None:
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, proposer="suffix", k=2))
    engine.scheduler.lag = lag
    params = replace(GREEDY, max_tokens=60)
    [plain] = run(engine, [PROMPT], replace(params, num_speculative_tokens=0))
    truth = tokens(plain)
    # Two right tokens lead to every place, and a wrong one follows.
    wrong = [t for a, b in pairwise(truth) for t in (a, b, (b + 1) % VOCAB)]
    [outputs] = run(engine, [PROMPT], params, [wrong])
    assert tokens(outputs) == truth
    num_drafts = outputs[-1].num_draft_tokens - outputs[-1].num_accepted_tokens
    assert num_drafts < 2 * len(truth)


def test_a_sequence_whose_tokens_the_host_must_know_has_lookups_too(tiny_model: Tiny) -> None:
    """The host looks before it waits for the step in flight, and again behind its tokens."""
    engine = lagging(engine_config(tiny_model("llama", seed=0), proposer=("suffix",), k=2))
    params = replace(LONG, logit_bias={7: 100.0})
    engine.submit([NewRequest(request_id="0", prompt_token_ids=PROMPT, params=params)])
    engine.sequences.by_id["0"].needs_host = True
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert tokens(outputs) == [7] * 40
    assert outputs[-1].num_accepted_tokens > 20


def test_steps_without_drafts_call_no_source(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a small model the host's time decides, so plain steps must take what they take where
    nothing drafts.
    """
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=1)
    sources = ("prediction", "grammar", "suffix", "draft_model")
    engine = lagging(engine_config(target, draft, proposer=sources, adaptive=True, max_num_seqs=4))
    adaptive = engine.sequences.adaptive
    assert adaptive is not None
    adaptive.choose = lambda _, owns, *args, **options: [0] * len(owns)  # type: ignore[method-assign]
    calls = []
    for source in engine.worker.proposer.sources:
        for name in ("wish", "propose"):
            method = getattr(source, name)

            def noted(*args: object, method: Callable[..., object] = method) -> object:
                calls.append(method)
                return method(*args)

            monkeypatch.setattr(source, name, noted)
    plain = replace(LONG, num_speculative_tokens=0)
    run(engine, prompts([9, 20, 3, 5], VOCAB), plain)
    assert not calls
    params = replace(LONG, temperature=1.0, max_tokens=200)
    outputs = run(engine, prompts([9, 20, 3, 5], VOCAB), params)
    num_steps = max(map(len, outputs))
    assert num_steps > 150
    assert len(calls) < 2 * num_steps

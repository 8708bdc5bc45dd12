"""Sequences that must match a grammar, through the whole engine."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import GREEDY, run, tokens, without_pauses
from grammar_engines import EOS, OBJECT, PROMPT, TOKENIZER, VOCAB, config

from outrider.engine.api import NewRequest, RequestOutput, SamplingParams, SourceName
from outrider.engine.engine import Engine
from outrider.engine.grammars.grammar_messages import Question
from outrider.engine.grammars.grammar_process import GrammarProcess
from outrider.engine.plan import Plan
from outrider.engine.request import Request


def of_schema(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps({"x-guidance": {"whitespace_flexible": False}} | schema)


def text_of(outputs: list[RequestOutput]) -> str:
    return TOKENIZER.decode(tokens(outputs), skip_special_tokens=True)


@pytest.mark.parametrize("proposer", ["draft_model", "suffix", "none"])
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_every_finished_text_is_of_the_grammar(
    tiny_model: Callable[..., Path], proposer: str, rule: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    params = SamplingParams(
        max_tokens=40, grammar=f"start: %json {json.dumps(schema)}", verification=rule
    )
    each = [
        replace(
            params, seed=seed, temperature=[1.0, 0.0, 3.0][seed % 3], top_p=[1.0, 0.9][seed % 2]
        )
        for seed in range(6)
    ]
    for outputs in run(Engine(config(tiny_model, proposer)), [PROMPT] * 6, each):
        last = outputs[-1]
        assert last.error is None
        if last.finish_reason == "stop":
            assert last.stop_token_id == EOS
            assert json.loads(text_of(outputs)).keys() == {"a", "b"}
        else:
            assert text_of(outputs).startswith('{"a":')


@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_drafts_change_nothing_but_the_pace(tiny_model: Callable[..., Path], proposer: str) -> None:
    engine = Engine(config(tiny_model, proposer))
    params = [
        replace(GREEDY, grammar=OBJECT, max_tokens=48, logprobs=3),
        SamplingParams(
            grammar="start: /(one two ){9}/",
            max_tokens=48,
            seed=5,
            verification="match",
            top_k=20,
            logprobs=0,
        ),
    ]
    plain, drafted = (
        run(engine, [PROMPT] * 2, [replace(p, num_speculative_tokens=k) for p in params])
        for k in (0, 3)
    )
    assert [tokens(o) for o in plain] == [tokens(o) for o in drafted]
    for one, other in zip(plain, drafted, strict=True):
        a, b = ([entry for o in outputs for entry in o.logprobs or ()] for outputs in (one, other))
        assert [x.logprob for x in a] == pytest.approx([x.logprob for x in b], abs=1e-4)
    assert sum(engine.stats().accepted_per_position) > 0


def test_logprobs_are_of_what_the_target_itself_said(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(config(tiny_model))
    params = replace(GREEDY, max_tokens=1, logprobs=VOCAB // 4)
    ((free,),) = run(engine, [PROMPT], params)
    ((bound,),) = run(engine, [PROMPT], replace(params, grammar='start: "quick"'))
    assert free.logprobs is not None
    assert bound.logprobs is not None
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def test_neighbours_of_a_grammar_see_nothing_of_it(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(config(tiny_model))
    free = SamplingParams(max_tokens=20, seed=3)
    bound = SamplingParams(max_tokens=20, seed=4, grammar=OBJECT)
    (alone,) = run(engine, [PROMPT], free)
    (bound_alone,) = run(engine, [PROMPT], bound)
    first, other, last = run(engine, [PROMPT] * 3, [bound, free, replace(bound, seed=9)])
    assert tokens(other) == tokens(alone)
    assert tokens(first) == tokens(bound_alone)
    assert tokens(last) != tokens(first)


def test_a_preempted_sequence_goes_on_in_its_grammar(tiny_model: Callable[..., Path]) -> None:
    params = [
        SamplingParams(max_tokens=40, seed=s, grammar=OBJECT, ignore_eos=True) for s in (1, 2)
    ]
    alone = [tokens(run(Engine(config(tiny_model)), [PROMPT], p)[0]) for p in params]
    engine = Engine(config(tiny_model, num_pages=18))
    assert [tokens(o) for o in run(engine, [PROMPT] * 2, params)] == alone
    assert engine.stats().preemptions > 0


def test_drafts_after_a_preemption_fit_the_grammar(tiny_model: Callable[..., Path]) -> None:
    """It comes back while a step of others is in flight."""
    base = config(tiny_model, num_pages=20)
    engine = Engine(replace(base, draft=base.target))  # every draft that is allowed is accepted
    engine.scheduler.lag = 1
    free = replace(GREEDY, num_speculative_tokens=0)
    each = [
        replace(free, max_tokens=16),
        replace(free, max_tokens=40),
        replace(GREEDY, max_tokens=60, grammar='start: ("1" "23" "456" "7890"){40}'),
    ]
    run(engine, [PROMPT], replace(each[2], max_tokens=1))  # compiles it
    bound = run(engine, [PROMPT] * 3, each)[2][-1]
    assert engine.stats().preemptions > 0
    assert bound.num_accepted_tokens == bound.num_draft_tokens > 0


def test_looked_up_drafts_of_all_sequences_are_checked_together(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config(tiny_model, "suffix"))
    params = replace(GREEDY, grammar='start: ("ab" | "ba" | "12")+', max_tokens=20)
    plain = run(engine, [PROMPT] * 3, replace(params, num_speculative_tokens=0))
    asked = []
    ask = GrammarProcess.ask

    def noted(self: GrammarProcess, questions: list[Question]) -> None:
        asked.append([question.fits for question in questions])
        ask(self, questions)

    monkeypatch.setattr(GrammarProcess, "ask", noted)
    truth = [tokens(each) for each in plain]
    outputs = run(engine, [PROMPT] * 3, params, truth)
    assert [tokens(each) for each in outputs] == truth
    assert sum(sum(fits) for fits in asked) > 3
    assert all(fits == [True] * 3 for fits in asked if any(fits))


FORCED = 'start: ("a" | "b") "0123456789" ("c" | "d") "98" "7"?'


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_a_grammar_forces_are_drafted_without_a_model_or_a_mask_more(
    tiny_model: Callable[..., Path], lag: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(GREEDY, grammar=FORCED, temperature=temperature, seed=3, verification="match")
    asked: list[int] = []
    ask = GrammarProcess.ask

    def noted(self: GrammarProcess, questions: list[Question]) -> None:
        asked.append(len(questions))
        ask(self, questions)

    monkeypatch.setattr(GrammarProcess, "ask", noted)

    def steps_of(sources: tuple[str, ...]) -> tuple[list[list[int]], int, int, set[str | None]]:
        engine = Engine(config(tiny_model, sources))
        engine.scheduler.lag = lag
        asked.clear()
        outputs = run(engine, [PROMPT, PROMPT[2:]], params)
        used = {output.source for each in outputs for output in each}
        return [tokens(each) for each in outputs], len(outputs[0]), sum(asked), used

    plain, num_steps, num_asked, _ = steps_of(("suffix",))
    answers, num_with, num_asked_with, used = steps_of(("grammar",))
    assert answers == plain
    if lag == 0:  # behind a step in flight nobody knows what is forced
        assert used == {None, "grammar"}
        assert num_with < num_steps / 2
        assert num_asked_with <= num_asked


def test_a_grammar_is_not_asked_what_it_forces_where_a_model_drafts(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts it as well, by its masks, and other masks would come on top."""
    own = config(tiny_model)
    sources: tuple[SourceName, ...] = ("grammar", "draft_model")
    engine = Engine(replace(own, speculation=replace(own.speculation, sources=sources)))
    prepare, prepared = engine.worker.proposer.prepare, []

    def noted(most: dict[Request, int]) -> None:
        prepared.append(len(most))
        prepare(most)

    monkeypatch.setattr(engine.worker.proposer, "prepare", noted)
    params = replace(GREEDY, grammar=FORCED)
    request = NewRequest(request_id="0", prompt_token_ids=PROMPT, params=params)
    for named in (None, ("grammar",)):
        prepared.clear()
        engine.submit([replace(request, sources=named)])
        while engine.has_work():
            engine.step()
        assert any(prepared) == (named is not None)


def test_a_slow_grammar_gets_no_more_masks_for_forced_tokens_than_its_allowance(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config(tiny_model, ("grammar",)))
    prepare, counts = engine.worker.proposer.prepare, []

    def few(most: dict[Request, int]) -> None:
        prepare(dict.fromkeys(most, 3))
        counts.extend(len(r.grammar.masks) for r in most if r.grammar is not None)

    monkeypatch.setattr(engine.worker.proposer, "prepare", few)
    run(engine, [PROMPT], replace(GREEDY, grammar=FORCED))
    assert max(counts) == 3


def test_masks_behind_the_drafts_of_a_void_step_count_no_more(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config(tiny_model, "suffix", k=2))
    engine.scheduler.lag = 1
    a, b, one, two = (TOKENIZER.encode(c, add_special_tokens=False)[0] for c in "ab12")
    params = replace(
        GREEDY, grammar='start: ("a1" | "b2")+', allowed_token_ids=(a, b, one, two), max_tokens=16
    )
    [plain] = run(engine, [PROMPT], replace(params, num_speculative_tokens=0))
    truth, other = tokens(plain), {a: b, b: a, one: one, two: two}
    slots, is_void = engine.worker.slots, True

    def propose(plan: Plan) -> list[int]:
        """The truth, but other letters in a step that will be void."""
        for scheduled in plan.emitting:
            if scheduled.max_drafts:
                drafts = truth[scheduled.request.num_output_tokens :][: scheduled.max_drafts]
                drafts = [other[draft] if is_void else draft for draft in drafts]
                slots.write_drafts([(scheduled.request, drafts)])
        return [scheduled.max_drafts for scheduled in plan.scheduled]

    without_pauses(engine)  # its drafts are not the source's own
    monkeypatch.setattr(engine.worker.proposer, "propose", propose)
    engine.submit([NewRequest(request_id="0", prompt_token_ids=PROMPT, params=params)])
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += engine.step()
        if (request := engine.sequences.by_id.get("0")) and request.num_drafts_in_flight:
            if is_void:
                engine.sequences.preempt(request)
            is_void = not is_void
    assert tokens(outputs) == truth
    assert outputs[-1].num_accepted_tokens > 0


(Q,) = TOKENIZER.encode("Q", add_special_tokens=False)


@pytest.mark.parametrize(
    "edit",
    [{"allowed_token_ids": (EOS,)}, {"bad_words": ((Q,),)}],
    ids=["allowed_token_ids", "bad_words"],
)
def test_edits_that_leave_a_grammar_no_token_fail_their_own_sequence(
    tiny_model: Callable[..., Path], edit: dict[str, Any]
) -> None:
    engine = Engine(config(tiny_model))
    good = SamplingParams(max_tokens=40, seed=1, grammar='start: "Q"')
    bad, other = run(engine, [PROMPT] * 2, [replace(good, **edit), good])
    assert bad[-1].finish_reason == "error"
    (name,) = edit
    assert bad[-1].error == f"{name}: it left no token to go on with, together with grammar"
    assert tokens(other) == [Q, EOS]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_min_tokens_does_not_hold_up_a_text_that_is_complete(
    tiny_model: Callable[..., Path], lag: int, k: int
) -> None:
    engine = Engine(config(tiny_model))
    engine.scheduler.lag = lag
    (newline,) = TOKENIZER.encode("\n", add_special_tokens=False)
    params = SamplingParams(max_tokens=40, min_tokens=30, num_speculative_tokens=k)
    texts = {
        'start: %json {"type": "boolean"}': ("true", "false"),
        "start: /Q|qQ/": ("Q", "qQ"),
        'start: "one" | "two three"': ("one", "two three"),
        'start: a\na: "1" b\nb: "2" | "3"': ("12", "13"),
    }
    each = [
        replace(params, grammar=grammar, seed=seed, temperature=[0.0, 1.0][seed % 2], **end)
        for seed, (grammar, end) in enumerate(
            (grammar, end) for grammar in texts for end in ({}, {"stop_token_ids": (newline,)})
        )
    ]
    for outputs, p in zip(run(engine, [PROMPT] * len(each), each), each, strict=True):
        assert outputs[-1].finish_reason == "stop", outputs[-1].error
        assert outputs[-1].stop_token_id in (EOS, *p.stop_token_ids)
        assert text_of(outputs).removesuffix("\n") in texts[p.grammar or ""]


def test_min_tokens_makes_a_text_go_on_that_may(tiny_model: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=6, grammar="start: /[Qq]*/", temperature=9.0)
    each = [replace(params, seed=seed) for seed in range(12)]
    lengths = {len(tokens(o)) for o in run(Engine(config(tiny_model)), [PROMPT] * 12, each)}
    assert lengths <= {7, 8, 9}


@pytest.mark.parametrize("k", [0, 3])
def test_a_complete_text_ends_even_if_other_edits_ban_its_end(
    tiny_model: Callable[..., Path], k: int
) -> None:
    engine = Engine(config(tiny_model))
    params = SamplingParams(max_tokens=40, seed=1, grammar='start: "Q"*', num_speculative_tokens=k)
    once = replace(params, grammar='start: "Q"')
    each = [replace(once, allowed_token_ids=(Q,)), replace(once, bad_words=((EOS,),))]
    for outputs in run(engine, [PROMPT] * 2, each):
        assert outputs[-1].finish_reason == "stop"
        assert tokens(outputs) == [Q]
    going_on, stuck = run(
        engine,
        [PROMPT] * 2,
        [
            replace(params, allowed_token_ids=(Q,)),
            replace(params, grammar='start: "Q" "x"', allowed_token_ids=(Q,)),
        ],
    )
    assert tokens(going_on) == [Q] * 40
    assert stuck[-1].is_dead_end


def test_ends_where_a_stop_id_may_end_it(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(config(tiny_model))
    (newline,) = TOKENIZER.encode("\n", add_special_tokens=False)
    params = SamplingParams(
        max_tokens=60, grammar="start: /[a-z]{3}/", stop_token_ids=(newline,), ignore_eos=True
    )
    each = [replace(params, seed=seed, temperature=2.0) for seed in range(8)]
    reasons = set()
    for outputs in run(engine, [PROMPT] * 8, each):
        assert text_of(outputs).strip("\n").isalpha()
        assert len(text_of(outputs).strip("\n")) == 3
        reasons.add(outputs[-1].stop_token_id)
    assert newline in reasons


def test_a_text_that_can_never_end_goes_on_to_max_tokens(tiny_model: Callable[..., Path]) -> None:
    itself = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    whole = {"type": "array", "items": {"oneOf": [{"$ref": "#/items"}, False]}, "maxItems": 0}
    params = SamplingParams(max_tokens=40, seed=1, temperature=2.0)
    grammars = ('start: "x" a\na: "y" a', of_schema(itself), of_schema(whole))
    each = [replace(params, grammar=grammar) for grammar in grammars]
    *endless, ending = run(Engine(config(tiny_model)), [PROMPT] * 3, each)
    assert [outputs[-1].finish_reason for outputs in endless] == ["length"] * 2
    assert text_of(ending) == "[]"


@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_a_prediction_is_drafted_as_far_as_it_fits(
    tiny_model: Callable[..., Path], proposer: str
) -> None:
    engine = Engine(config(tiny_model, proposer))
    params = replace(GREEDY, grammar='start: "abababab"', max_tokens=12)
    [plain] = run(engine, [PROMPT], replace(params, num_speculative_tokens=0))
    [outputs] = run(engine, [PROMPT], params, [tokens(plain)[:4] + PROMPT])
    assert tokens(outputs) == tokens(plain)
    assert any(output.source == "prediction" for output in outputs)
    assert outputs[-1].num_accepted_tokens == outputs[-1].num_draft_tokens

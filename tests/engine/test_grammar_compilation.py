"""Grammars are compiled beside the steps, and those that fail hurt only their own sequences."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from engines import GREEDY, run
from grammar_engines import OBJECT, PROMPT, config

from outrider.engine.api import (
    InvalidRequestError,
    NewRequest,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from outrider.engine.engine import Engine
from outrider.engine.grammars.grammar_messages import Verdict


def test_others_run_while_a_grammar_is_compiled(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config(tiny_model))
    assert engine._grammars is not None
    pending: list[tuple[Callable[[], Verdict], Future[Verdict]]] = []

    def later(work: Callable[[], Verdict]) -> Future[Verdict]:
        pending.append((work, Future()))
        return pending[-1][1]

    monkeypatch.setattr(engine._grammars, "_run", later)
    bound, free = replace(GREEDY, grammar=OBJECT, max_tokens=4), replace(GREEDY, max_tokens=4)
    gone = replace(bound, grammar=f"{OBJECT} ")
    engine.submit(
        [
            NewRequest(request_id=name, prompt_token_ids=PROMPT, params=params)
            for name, params in (("bound", bound), ("free", free), ("gone", gone))
        ]
    )
    processes = list(engine._grammars._processes.values())
    finished = []
    while not finished:
        finished += [o.request_id for o in engine.step() if o.finish_reason is not None]
    assert finished == ["free"]
    engine.abort(["gone"])
    assert [process.is_usable() for process in processes] == [True, False]
    assert engine.step() == []  # which waits a moment for the grammar
    assert engine.has_work()
    compile_it, begun = pending[0]
    begun.set_result(compile_it())
    while engine.has_work():
        finished += [o.request_id for o in engine.step() if o.finish_reason is not None]
    assert finished == ["free", "bound"]
    engine.check_integrity()


def test_a_grammar_that_fails_fails_its_own_sequence(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(config(tiny_model))
    good = SamplingParams(max_tokens=8, seed=1, grammar=OBJECT)
    bad, other = run(engine, [PROMPT] * 2, [replace(good, grammar="start: nobody"), good])
    assert bad[-1].finish_reason == "error"
    assert "unknown name" in (bad[-1].error or "")
    assert other[-1].error is None


def test_sequences_whose_grammars_cannot_be_compiled_leave_nothing_behind(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config(tiny_model))
    assert engine._grammars is not None
    futures: list[Future[Verdict]] = []

    def run_none(work: Callable[[], Verdict]) -> Future[Verdict]:
        if futures:
            raise RuntimeError("can't start new thread")
        futures.append(Future())
        return futures[-1]

    monkeypatch.setattr(engine._grammars, "_run", run_none)
    params = replace(GREEDY, grammar=OBJECT, max_tokens=4)
    pair = [
        NewRequest(request_id=name, prompt_token_ids=PROMPT, params=replace(params, grammar=text))
        for name, text in (("a", OBJECT), ("b", f"{OBJECT} "))
    ]
    with pytest.raises(RuntimeError, match="start new thread"):
        engine.submit(pair)
    assert [process.is_usable() for process in engine._grammars._processes.values()] == [False]
    assert not engine.has_work()
    assert engine.stats().num_waiting == 0
    monkeypatch.undo()
    for outputs in run(engine, [PROMPT] * 2, params):
        assert outputs[-1].finish_reason == "length"


def test_a_request_that_finds_the_queue_full_costs_no_grammar(
    tiny_model: Callable[..., Path],
) -> None:
    engine = Engine(config(tiny_model, max_num_seqs=1, max_queue_len=0))
    assert engine._grammars is not None
    params = replace(GREEDY, grammar=OBJECT, max_tokens=4)
    engine.submit([NewRequest(request_id="a", prompt_token_ids=PROMPT, params=params)])
    other = replace(params, grammar=f"{OBJECT} ")
    with pytest.raises(QueueFullError):
        engine.submit([NewRequest(request_id="b", prompt_token_ids=PROMPT, params=other)])
    assert list(engine._grammars._processes) == [("", OBJECT)]


def test_a_compilation_that_ends_in_an_exception_ends_its_own_sequence(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config(tiny_model))
    assert engine._grammars is not None
    broken: Future[Verdict] = Future()
    broken.set_exception(OSError("no more processes"))
    monkeypatch.setattr(engine._grammars, "_run", lambda work: broken)
    free = replace(GREEDY, max_tokens=4)
    bad, good = run(engine, [PROMPT] * 2, [replace(free, grammar=OBJECT), free])
    assert (bad[-1].finish_reason, good[-1].finish_reason) == ("error", "length")
    assert bad[-1].error == "grammar: OSError: no more processes"


def test_a_grammar_is_compiled_again_for_another_salt(tiny_model: Callable[..., Path]) -> None:
    """As with prefixes: otherwise times would show what other clients ask for."""
    engine = Engine(config(tiny_model))
    params = replace(GREEDY, grammar=OBJECT, max_tokens=1)
    for i, salt in enumerate(["", "a", "b", "a"]):
        engine.submit(
            [NewRequest(request_id=str(i), prompt_token_ids=PROMPT, params=params, cache_salt=salt)]
        )
    assert engine._grammars is not None
    processes = engine._grammars._processes
    assert list(processes) == [("", OBJECT), ("b", OBJECT), ("a", OBJECT)]
    assert len({id(process) for process in processes.values()}) == 3
    engine.abort([str(i) for i in range(4)])


def test_a_grammars_process_that_is_killed_is_not_the_requests_fault(
    tiny_model: Callable[..., Path],
) -> None:
    engine = Engine(config(tiny_model))
    params = replace(GREEDY, grammar=OBJECT, max_tokens=30, ignore_eos=True)
    other = replace(params, grammar="start: /[a-z]*/")
    assert engine._grammars is not None
    engine._grammars.warm_up()
    zygote = engine._grammars._zygote.process
    assert zygote is not None
    while not (waiting := psutil.Process(zygote.pid).children()):
        time.sleep(0.01)
    outputs: list[RequestOutput] = []
    for name, each in (("killed", params), ("other", other)):  # the first gets the fork that waits
        engine.submit([NewRequest(request_id=name, prompt_token_ids=PROMPT, params=each)])
        while not engine.sequences.by_id[name].num_output_tokens:
            outputs += engine.step()
    waiting[0].kill()
    while engine.has_work():
        outputs += engine.step()
    last = {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert last["killed"].finish_reason == "error"
    assert "ended from outside" in (last["killed"].error or "")
    assert not last["killed"].is_dead_end
    assert last["other"].finish_reason == "length"
    [again] = run(engine, [PROMPT], params)
    assert again[-1].finish_reason == "length"


def test_an_engine_without_a_token_table_takes_no_grammar(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(replace(config(tiny_model), token_table=None))
    new = NewRequest(
        request_id="0", prompt_token_ids=PROMPT, params=replace(GREEDY, grammar=OBJECT)
    )
    with pytest.raises(InvalidRequestError, match="given no token table"):
        engine.submit([new])
    assert not engine.has_work()

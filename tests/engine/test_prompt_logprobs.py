"""Prompt logprobs: the target's own, through chunks, prefix hits and preemption."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, generate, prompts, run, tokens
from tiny_models import DEVICE, VOCAB, Tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine.api import (
    InvalidRequestError,
    NewRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from outrider.engine.engine import Engine
from outrider.engine.models.network import Pass
from outrider.engine.plan import Plan
from outrider.engine.request import Request
from outrider.engine.scheduling import scheduler
from outrider.engine.scoring import scorer
from outrider.engine.state.batch import HostBatch

MIXED = prompts([3, 40, 1, 17, 90, 8], VOCAB)
SCORED = replace(GREEDY, prompt_logprobs=3)


@pytest.fixture(scope="module")
def plain(target: Path, draft: Path) -> list[list[int]]:
    return [tokens(o) for o in run(Engine(engine_config(target, draft)), MIXED, GREEDY)]


def logprobs_of_prompt(outputs: list[RequestOutput]) -> list[TokenLogprobs]:
    """What was returned of the prompt, all of it no later than the first new token."""
    begun = False
    entries = []
    for output in outputs:
        assert not (begun and output.prompt_logprobs)
        begun = begun or bool(output.token_ids)
        entries += output.prompt_logprobs or []
    return entries


def assert_are_the_targets_own(target: Path, prompt: list[int], given: list[TokenLogprobs]) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().to(DEVICE)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt], device=DEVICE)).logits[0, :-1].cpu()
    assert len(given) == len(prompt) - 1
    for row, token_id, entry in zip(logits.log_softmax(-1), prompt[1:], given, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        order = row.argsort(descending=True).tolist()
        assert [t for t, _ in entry.top] == order[:3]
        assert entry.rank == order.index(token_id) + 1
        assert all(value == entry.logprob for t, value in entry.top if t == token_id)


@pytest.mark.parametrize("chunk", [7, 64])
def test_prompt_logprobs_are_the_targets_raw_ones(
    target: Path, draft: Path, plain: list[list[int]], chunk: int
) -> None:
    config = engine_config(target, draft, max_num_batched_tokens=chunk)
    outputs = run(Engine(config), MIXED, SCORED)
    assert [tokens(o) for o in outputs] == plain
    for prompt, each in zip(MIXED, outputs, strict=True):
        assert_are_the_targets_own(target, prompt, logprobs_of_prompt(each))


def test_a_cached_prefix_is_scored_all_the_same(target: Path, draft: Path) -> None:
    engine = Engine(engine_config(target, draft))
    run(engine, [MIXED[4]], GREEDY)
    scored, cached = run(engine, [MIXED[4]] * 2, [SCORED, GREEDY])
    assert_are_the_targets_own(target, MIXED[4], logprobs_of_prompt(scored))
    assert scored[-1].num_cached_tokens == 0
    assert cached[-1].num_cached_tokens == 88
    assert tokens(scored) == tokens(cached)


def test_rows_that_score_a_prompt_take_no_second_place(
    target: Path, draft: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[tuple[Tensor, Tensor]] = []
    score = scorer.score_prompts

    def scored(plan: Plan, given: Tensor, *args: Any) -> Tensor:
        logits.append((given, score(plan, given, *args)))
        return logits[-1][1]

    monkeypatch.setattr(scorer, "score_prompts", scored)
    engine = Engine(engine_config(target, draft, max_num_batched_tokens=16))
    params = [GREEDY, SCORED, GREEDY, SCORED, GREEDY, SCORED]
    assert [tokens(outputs) for outputs in run(engine, MIXED, params)] == plain
    assert any(len(rest) > 4 for _, rest in logits)  # beside sequences that decode
    assert all(given.data_ptr() == rest.data_ptr() for given, rest in logits)


def test_rows_for_the_output_layer_are_bounded(
    target: Path, draft: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_PROMPT_LOGITS", 5)
    engine = Engine(engine_config(target, draft))
    rows = []
    forward = engine.worker.scorer._target.forward

    def watch(batch: HostBatch) -> Pass:
        computed = forward(batch)
        rows.append(len(computed.logits))
        return computed

    monkeypatch.setattr(engine.worker.scorer._target, "forward", watch)
    outputs = run(engine, MIXED, [SCORED, SCORED, SCORED, GREEDY, SCORED, GREEDY])
    assert max(rows) <= 5 + 6 * 5  # the prompt's, and k + 1 for each sequence
    assert [tokens(o) for o in outputs] == plain
    for i in (0, 1, 2, 4):
        assert_are_the_targets_own(target, MIXED[i], logprobs_of_prompt(outputs[i]))


def test_preemption_returns_nothing_twice(target: Path, draft: Path) -> None:
    config = engine_config(target, draft, num_pages=31, max_num_batched_tokens=16)
    engine = Engine(replace(config, max_model_len=120))
    small = prompts([20, 20, 60, 50], VOCAB, seed=5)
    outputs = run(engine, small, SCORED)
    assert engine.stats().preemptions > 0
    for prompt, each in zip(small, outputs, strict=True):
        assert_are_the_targets_own(target, prompt, logprobs_of_prompt(each))


def test_a_prompt_can_be_scored_without_a_new_token(target: Path, draft: Path) -> None:
    engine = Engine(engine_config(target, draft))
    outputs = run(engine, MIXED, replace(SCORED, max_tokens=0))
    for prompt, each in zip(MIXED, outputs, strict=True):
        assert_are_the_targets_own(target, prompt, logprobs_of_prompt(each))
        assert (tokens(each), each[-1].finish_reason) == ([], "length")
    assert engine.stats().generation_tokens == 0


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_that_fills_the_context_can_be_scored(
    target: Path, draft: Path, chunk: int, lag: int
) -> None:
    config = engine_config(target, draft, page_size=4, num_pages=11, max_num_batched_tokens=chunk)
    engine = Engine(replace(config, max_model_len=40))
    engine.scheduler.lag = lag
    (full,) = prompts([40], VOCAB, seed=9)
    (outputs,) = run(engine, [full], replace(SCORED, max_tokens=0))
    assert_are_the_targets_own(target, full, logprobs_of_prompt(outputs))
    assert (tokens(outputs), outputs[-1].finish_reason) == ([], "length")
    for num_tokens, max_tokens in [(41, 0), (40, 1)]:
        (prompt,) = prompts([num_tokens], VOCAB, seed=9)
        params = replace(SCORED, max_tokens=max_tokens)
        with pytest.raises(InvalidRequestError, match="the context holds 40 tokens in all"):
            engine.submit([NewRequest(request_id="x", prompt_token_ids=prompt, params=params)])


def test_a_nan_among_the_logits_of_a_prompt_fails_that_request_only(
    tiny_model: Tiny, tmp_path: Path, draft: Path, plain: list[list[int]]
) -> None:
    poison = next(t for t in range(VOCAB) if t not in MIXED[1] + plain[1])
    poisoned = AutoModelForCausalLM.from_pretrained(tiny_model("llama", seed=0))
    with torch.no_grad():
        poisoned.get_input_embeddings().weight[poison] = float("nan")
    poisoned.save_pretrained(tmp_path)
    engine = Engine(engine_config(tmp_path, draft, max_num_batched_tokens=8))
    bad, good = run(engine, [[1, poison, *MIXED[1]], MIXED[1]], SCORED)
    assert bad[-1].finish_reason == "error"
    assert not logprobs_of_prompt(bad)
    assert tokens(good) == plain[1]


@pytest.mark.parametrize("meanwhile", ["runs", "preempted again", "overtaken"])
def test_a_prompt_that_finds_a_page_of_nan_is_scored_again(
    tiny_model: Tiny, tmp_path: Path, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that makes the target NaN spoils a page. Before the host knows, a prompt that was
    preempted after its first chunk finds it.
    """
    # Three layers: behind a page of NaN, the third layer's keys and values are NaN.
    sound = tiny_model("llama", seed=0, num_hidden_layers=3)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    begin, rest = prompts([43, 100], VOCAB, seed=3)
    prompt = [*begin, *generate(sound, begin, 1), *rest]  # the first 44 fill 11 pages
    poison = next(t for t in range(VOCAB) if t not in prompt)
    poisoned = AutoModelForCausalLM.from_pretrained(sound)
    with torch.no_grad():
        poisoned.get_input_embeddings().weight[poison] = float("nan")
    poisoned.save_pretrained(tmp_path)
    options = {"max_num_batched_tokens": 46, "max_num_seqs": 2}
    engine = Engine(engine_config(tmp_path, draft, k=1, **options))
    engine.scheduler.lag = 1
    slots, sequences = engine.worker.slots, engine.sequences

    def propose(plan: Plan) -> list[int]:
        for each in plan.emitting:
            if each.max_drafts:
                slots.token_ids[each.slot, slots.num_tokens[each.slot]] = poison
        return [each.max_drafts for each in plan.scheduled]

    monkeypatch.setattr(engine.worker.proposer, "propose", propose)

    def submit(name: str, prompt: list[int], params: SamplingParams, priority: int) -> Request:
        new = NewRequest(request_id=name, prompt_token_ids=prompt, params=params, priority=priority)
        engine.submit([new])
        return sequences.by_id[name]

    scored = submit("scored", prompt, replace(SCORED, max_tokens=1), 1)
    outputs = engine.step() + engine._commit()
    sequences.memory.forget(scored.memory)  # as if others had taken its pages
    sequences.preempt(scored)
    submit("spoils", begin, replace(GREEDY, max_tokens=4), 0)
    submit("has the other slot until then", [1], replace(GREEDY, max_tokens=1), 0)
    outputs += [output for _ in range(3) for output in engine.step()]
    assert scored.num_cached_tokens == 0
    if meanwhile == "preempted again":
        sequences.preempt(scored)
        outputs += engine._commit()
    elif meanwhile == "overtaken":  # it waits while a chunk is read that was launched before
        outputs += engine.step()
        submit("overtakes", [2], GREEDY, 0)
    while engine.has_work():
        outputs += engine.step()
    engine.check_integrity()
    by_name = {name: [o for o in outputs if o.request_id == name] for name in ("scored", "spoils")}
    assert_are_the_targets_own(tmp_path, prompt, logprobs_of_prompt(by_name["scored"]))
    assert tokens(by_name["scored"]) == generate(sound, prompt, 1)
    assert tokens(by_name["spoils"]) == generate(sound, begin, 4)
    assert scored.speculates == (meanwhile == "preempted again")  # otherwise it did start over
    later = submit("finds what it left", prompt, replace(GREEDY, max_tokens=1), 0)
    while engine.has_work():
        engine.step()
    assert later.speculates


def test_a_prompt_is_scored_even_if_its_first_drafts_come_to_nothing(
    target: Path, draft: Path
) -> None:
    """Its own edits leave the request no token after the first draft: it starts over without."""
    engine = Engine(engine_config(target, draft))
    params = replace(SCORED, allowed_token_ids=(5,), bad_words=((5, 5),))
    [outputs] = run(engine, MIXED[1:2], params)
    assert_are_the_targets_own(target, MIXED[1], logprobs_of_prompt(outputs))
    assert tokens(outputs) == [5]
    assert outputs[-1].is_dead_end


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("k", [0, 2])
def test_a_prompt_is_scored_even_if_no_token_may_follow_it(
    target: Path, draft: Path, k: int, max_tokens: int
) -> None:
    stands_for = pytest.importorskip("grammars").stands_for  # needs what reads grammars
    params = replace(
        SCORED,
        max_tokens=max_tokens,
        grammar='start: "a"',
        allowed_token_ids=(5,),
        num_speculative_tokens=k,
    )
    config = replace(
        engine_config(target, draft),
        token_table=stands_for("a", *("b" * i for i in range(1, VOCAB - 1))),
        eos_token_ids=(VOCAB - 1,),
    )
    [outputs] = run(Engine(config), MIXED[1:2], params)
    assert_are_the_targets_own(target, MIXED[1], logprobs_of_prompt(outputs))
    assert tokens(outputs) == []
    last = outputs[-1]
    assert (last.finish_reason, last.is_dead_end) == (
        ("length", False) if max_tokens == 0 else ("error", True)
    )

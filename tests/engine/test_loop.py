"""The whole engine on tiny models: its output is the target's own, whatever runs beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, engine_config, generate, prompts, run, tokens
from tiny_models import DEVICE, VOCAB, Tiny
from transformers import AutoModelForCausalLM

from outrider.engine.api import (
    InvalidRequestError,
    NewRequest,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from outrider.engine.config import ConfigError
from outrider.engine.engine import Engine
from outrider.engine.plan import Plan

MIXED = prompts([3, 40, 1, 17, 90, 8], VOCAB)


@pytest.fixture(scope="module")
def truth(target: Path) -> list[list[int]]:
    return [generate(target, prompt, GREEDY.max_tokens) for prompt in MIXED]


@pytest.mark.parametrize("k", [0, 1, 3, 5, 8])
def test_greedy_output_is_the_targets_own_for_any_k(
    target: Path, draft: Path, truth: list[list[int]], k: int
) -> None:
    engine = Engine(engine_config(target, draft, k=k))
    assert [tokens(o) for o in run(engine, MIXED, GREEDY)] == truth
    drafted = engine.stats().drafted_per_position
    assert all(count > 0 for count in drafted[:k])
    assert not any(drafted[k:])  # there is room for drafts that are looked up


def test_greedy_output_is_the_targets_own_with_ngram_drafts(
    target: Path, truth: list[list[int]]
) -> None:
    engine = Engine(engine_config(target, proposer="suffix"))
    assert [tokens(o) for o in run(engine, MIXED, GREEDY)] == truth
    assert engine.stats().drafted_per_position[0] > 0


def test_each_sequence_keeps_its_own_k(target: Path, draft: Path, truth: list[list[int]]) -> None:
    engine = Engine(engine_config(target, draft, k=5))
    params = [replace(GREEDY, num_speculative_tokens=i % 6) for i in range(len(MIXED))]
    outputs = run(engine, MIXED, params)
    assert [tokens(o) for o in outputs] == truth
    assert outputs[0][-1].num_draft_tokens == 0
    assert outputs[5][-1].num_draft_tokens > outputs[1][-1].num_draft_tokens > 0


def test_the_draft_reads_no_prompt_that_it_is_not_to_draft_for(target: Path, draft: Path) -> None:
    engine = Engine(engine_config(target, draft, k=3, max_num_batched_tokens=16))
    read = {}
    for k in (0, 3):
        (prompt,) = prompts([50], VOCAB, seed=k)
        params = replace(GREEDY, num_speculative_tokens=k)
        engine.submit([NewRequest(request_id="0", prompt_token_ids=prompt, params=params)])
        engine.step()
        read[k] = engine.sequences.running[0].memory.num_draft_computed_tokens
        engine.abort(["0"])
    assert read == {0: 0, 3: 16}


def test_a_measured_k_changes_nobodys_output(
    target: Path, draft: Path, truth: list[list[int]]
) -> None:
    engine = Engine(engine_config(target, draft, k=5, adaptive=True))
    for _ in range(3):
        assert [tokens(o) for o in run(engine, MIXED, GREEDY)] == truth
    drafted = engine.stats().drafted_per_position
    assert drafted[0] > drafted[4]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU would wait for each draft")
def test_drafts_end_with_one_that_the_draft_model_holds_for_unlikely(
    target: Path, tiny_model: Callable[..., Path]
) -> None:
    drafted = {}
    for scale in (0.05, 0.9):  # of its weights: what it gives its first choice grows with them
        draft = tiny_model("llama", seed=4, scale=scale)
        engine = Engine(engine_config(target, draft, k=3))
        engine.scheduler.drafting.least_chance = 0.1
        run(engine, MIXED, GREEDY)
        drafted[scale] = engine.stats().drafted_per_position
    assert drafted[0.05][0] > 0 == drafted[0.05][1]
    assert drafted[0.9][2] > 0


def test_preemption_changes_nobodys_output(
    target: Path, draft: Path, truth: list[list[int]]
) -> None:
    # 30 pages of 4 hold one sequence of 114 tokens and hardly another.
    config = engine_config(target, draft, num_pages=31, prefix_caching=False)
    engine = Engine(replace(config, max_model_len=120))
    assert [tokens(o) for o in run(engine, MIXED, GREEDY)] == truth
    small = prompts([20, 20, 20, 20], VOCAB, seed=5)
    alone = [tokens(run(engine, [p], GREEDY)[0]) for p in small]
    assert [tokens(o) for o in run(engine, small, GREEDY)] == alone
    assert engine.stats().preemptions > 0


def test_prefix_hits_change_nobodys_output(
    target: Path, draft: Path, truth: list[list[int]]
) -> None:
    engine = Engine(engine_config(target, draft))
    run(engine, MIXED, GREEDY)
    again = run(engine, MIXED, GREEDY)
    assert [tokens(o) for o in again] == truth
    assert again[4][-1].num_cached_tokens >= 80


@pytest.mark.parametrize("chunk", [16, 64])
def test_samples_that_come_together_compute_their_prompt_once(
    target: Path, draft: Path, chunk: int
) -> None:
    params = [SamplingParams(max_tokens=8, seed=i, verification="match") for i in range(4)]
    alone = [tokens(run(Engine(engine_config(target, draft)), [MIXED[1]], [p])[0]) for p in params]
    engine = Engine(engine_config(target, draft, max_num_batched_tokens=chunk))
    outputs = run(engine, [MIXED[1]] * 4, params)
    assert [tokens(o) for o in outputs] == alone
    assert [o[-1].num_cached_tokens for o in outputs] == [0, 36, 36, 36]


def test_whoever_computes_a_shared_prefix_may_go_away(target: Path, draft: Path) -> None:
    engine = Engine(engine_config(target, draft, max_num_batched_tokens=16))
    [alone] = run(engine, [MIXED[4]], GREEDY)
    engine = Engine(engine_config(target, draft, max_num_batched_tokens=16))
    engine.submit(
        [NewRequest(request_id=i, prompt_token_ids=MIXED[4], params=GREEDY) for i in "abc"]
    )
    engine.step()
    engine.step()
    assert engine.stats().num_running == 1
    engine.abort(["a"])
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert tokens([o for o in outputs if o.request_id == "b"]) == tokens(alone)
    assert next(o.num_cached_tokens for o in outputs if o.request_id == "b") == 32
    engine.check_integrity()


def test_sequences_are_seated_by_priority_and_then_by_arrival(target: Path) -> None:
    engine = Engine(engine_config(target, max_num_seqs=1))
    engine.submit(
        [
            NewRequest(request_id=str(i), prompt_token_ids=[i], params=GREEDY, priority=priority)
            for i, priority in enumerate([3, 0, 3, -1])
        ]
    )
    finished = []
    while engine.has_work():
        finished += [o.request_id for o in engine.step() if o.finish_reason]
    assert finished == ["3", "1", "0", "2"]


def test_pages_are_taken_back_from_the_lowest_priority(target: Path) -> None:
    config = engine_config(target, num_pages=16, prefix_caching=False)  # 60 tokens
    engine = Engine(replace(config, max_model_len=60))
    outputs = []
    for name, priority in (("old", 1), ("young", 0)):
        prompt = MIXED[3]  # both fit; with what follows they do not
        engine.submit(
            [NewRequest(request_id=name, prompt_token_ids=prompt, params=GREEDY, priority=priority)]
        )
        outputs += engine.step()
    while engine.has_work():
        outputs += engine.step()
    assert engine.stats().preemptions > 0
    assert [o.request_id for o in outputs if o.finish_reason] == ["young", "old"]
    old, young = ([o for o in outputs if o.request_id == name] for name in ("old", "young"))
    assert tokens(old) == tokens(young)
    engine.check_integrity()


def test_a_prompt_in_chunks_delays_nobody_and_changes_nothing(
    target: Path, draft: Path, truth: list[list[int]]
) -> None:
    engine = Engine(engine_config(target, draft, max_num_batched_tokens=8, max_num_seqs=8))
    assert [tokens(o) for o in run(engine, MIXED, GREEDY)] == truth


def test_fewer_rows_than_seats_stall_nobody(
    target: Path, draft: Path, truth: list[list[int]]
) -> None:
    engine = Engine(engine_config(target, draft, max_num_batched_tokens=2, max_num_seqs=6))
    assert [tokens(o) for o in run(engine, MIXED, GREEDY)] == truth


def test_drafts_starve_no_sequence_that_decodes(target: Path, draft: Path) -> None:
    engine = Engine(engine_config(target, draft, k=8, max_num_batched_tokens=12, max_num_seqs=4))
    engine.submit(
        [NewRequest(request_id=str(i), prompt_token_ids=[i], params=GREEDY) for i in range(4)]
    )
    for _ in range(3):
        engine.step()
    for _ in range(5):
        assert {output.request_id for output in engine.step()} == {"0", "1", "2", "3"}


def test_a_sequence_outgrows_the_drafts_context_and_finishes(
    tiny_model: Tiny, target: Path
) -> None:
    short = tiny_model("llama", seed=0, num_hidden_layers=1, max_position_embeddings=32)
    engine = Engine(engine_config(target, short, k=4))
    long, beside = run(engine, [MIXED[1][:20], MIXED[0]], replace(GREEDY, max_tokens=100))
    assert tokens(long) == generate(target, MIXED[1][:20], 100)
    assert tokens(beside) == generate(target, MIXED[0], 100)
    assert 0 < long[-1].num_draft_tokens < 60


def test_a_draft_that_fails_costs_nobody_the_request(
    target: Path, draft: Path, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(engine_config(target, draft))

    def fail(batch: object) -> None:
        raise RuntimeError("no draft today")

    assert engine.worker.pair.draft is not None
    monkeypatch.setattr(engine.worker.pair.draft, "forward", fail)
    assert [tokens(o) for o in run(engine, MIXED, GREEDY)] == truth


def test_sampled_tokens_are_the_same_alone_and_in_company(target: Path, draft: Path) -> None:
    params = [
        SamplingParams(
            max_tokens=20, temperature=0.9, top_p=0.9, seed=i, num_speculative_tokens=i % 5
        )
        for i in range(len(MIXED))
    ]
    engine = Engine(engine_config(target, draft))
    alone = [tokens(run(engine, [p], [s])[0]) for p, s in zip(MIXED, params, strict=True)]
    together = [tokens(o) for o in run(engine, MIXED, params)]
    backwards = [tokens(o) for o in run(engine, MIXED[::-1], params[::-1])][::-1]
    assert together == alone
    assert backwards == alone


@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_match_draws_the_same_tokens_for_any_k(target: Path, draft: Path, proposer: str) -> None:
    def params(k: int) -> list[SamplingParams]:
        return [
            SamplingParams(
                max_tokens=20,
                temperature=0.8,
                top_k=30,
                seed=i,
                verification="match",
                num_speculative_tokens=k,
            )
            for i in range(len(MIXED))
        ]

    engine = Engine(
        engine_config(target, draft if proposer == "draft_model" else None, proposer=proposer, k=5)
    )
    plain = [tokens(o) for o in run(engine, MIXED, params(0))]
    for k in (1, 3, 5):
        assert [tokens(o) for o in run(engine, MIXED, params(k))] == plain
    assert engine.stats().drafted_per_position[0] > 0


def test_eos_and_stop_ids_end_a_sequence_inside_accepted_drafts(
    target: Path, truth: list[list[int]]
) -> None:
    own_draft = Engine(engine_config(target, target, k=6))  # every draft is accepted
    for prompt, expected in zip(MIXED, truth, strict=True):
        stop = expected[9]
        cut = expected[: expected.index(stop) + 1]
        [outputs] = run(own_draft, [prompt], replace(GREEDY, stop_token_ids=(stop,)))
        assert tokens(outputs) == cut
        assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", stop)
        [continued] = run(own_draft, [prompt + cut], GREEDY)
        assert tokens(continued)[: len(expected) - len(cut)] == expected[len(cut) :]


def test_eos_is_ignored_when_asked(target: Path, truth: list[list[int]]) -> None:
    config = replace(engine_config(target), eos_token_ids=(truth[0][4],))
    engine = Engine(config)
    stopped, full = run(engine, [MIXED[0]] * 2, [GREEDY, replace(GREEDY, ignore_eos=True)])
    assert tokens(stopped) == truth[0][: truth[0].index(truth[0][4]) + 1]
    assert tokens(full) == truth[0]
    assert full[-1].finish_reason == "length"


def test_the_context_ends_a_sequence_with_length(target: Path, draft: Path) -> None:
    engine = Engine(replace(engine_config(target, draft), max_model_len=50))
    [outputs] = run(engine, [MIXED[1]], replace(GREEDY, max_tokens=1000))
    assert len(tokens(outputs)) == 10
    assert outputs[-1].finish_reason == "length"


def test_logprobs_are_the_targets_raw_ones(target: Path, draft: Path) -> None:
    engine = Engine(engine_config(target, draft))
    params = SamplingParams(max_tokens=12, temperature=1.3, top_k=20, logprobs=3, seed=7)
    [outputs] = run(engine, [MIXED[3]], params)
    ids = tokens(outputs)
    given = [lp for o in outputs for lp in o.logprobs or []]
    assert len(given) == len(ids) == 12
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([MIXED[3] + ids])).logits[0, len(MIXED[3]) - 1 : -1]
    expected = logits.log_softmax(-1)
    for row, token_id, lp in zip(expected, ids, given, strict=True):
        assert lp.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert [t for t, _ in lp.top] == row.topk(3).indices.tolist()
        assert all(value == lp.logprob for t, value in lp.top if t == token_id)


@pytest.mark.parametrize("ids", [(5, 90, 5), tuple(range(VOCAB))[:128]])
def test_logprobs_of_named_tokens_take_the_place_of_the_best(
    target: Path, draft: Path, ids: tuple[int, ...]
) -> None:
    engine = Engine(engine_config(target, draft, k=3))
    asks = [
        replace(GREEDY, logprobs=3),
        replace(GREEDY, logprobs=0, logprob_token_ids=ids),
        replace(GREEDY, logprobs=2, logprob_token_ids=ids[:1]),
        GREEDY,
    ]
    best, named, one, unasked = run(engine, [MIXED[3]] * 4, asks)
    assert tokens(best) == tokens(named) == tokens(one) == tokens(unasked)
    entries = [lp for output in named for lp in output.logprobs or []]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([MIXED[3] + tokens(named)])).logits[0, len(MIXED[3]) - 1 : -1]
    for row, token_id, entry in zip(logits.log_softmax(-1), tokens(named), entries, strict=True):
        assert [i for i, _ in entry.top] == list(ids)
        assert [value for _, value in entry.top] == pytest.approx(row[list(ids)].tolist(), abs=1e-4)
        assert all(value == entry.logprob for i, value in entry.top if i == token_id)
    # The others of the batch get what they asked for.
    assert {len(lp.top) for output in best for lp in output.logprobs or []} == {3}
    assert {lp.top[0][0] for output in one for lp in output.logprobs or []} == {ids[0]}
    own = [
        [lp.logprob for output in each for lp in output.logprobs or []] for each in (best, named)
    ]
    assert own[0] == pytest.approx(own[1], abs=1e-4)  # a GPU rounds by the batch


@pytest.fixture(scope="module")
def poison(truth: list[list[int]]) -> int:
    return next(t for t in range(VOCAB) if t not in MIXED[1] + truth[1])


@pytest.fixture(scope="module")
def poisoned(target: Path, poison: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, but one token makes it NaN."""
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    path = tmp_path_factory.mktemp("poisoned")
    model.save_pretrained(path)
    return path


def test_a_nan_row_fails_that_request_only(
    poisoned: Path, poison: int, draft: Path, truth: list[list[int]]
) -> None:
    engine = Engine(engine_config(poisoned, draft))
    bad, good = run(engine, [[1, poison, 2], MIXED[1]], GREEDY)
    assert bad[-1].finish_reason == "error"
    assert "no finite logits" in (bad[-1].error or "")
    assert tokens(good) == truth[1]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_draft_that_makes_the_target_nan_costs_nobody_the_request(
    poisoned: Path,
    poison: int,
    draft: Path,
    truth: list[list[int]],
    lag: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It spoils KV of tokens before it, in pages that another sequence finds at once."""
    engine = Engine(engine_config(poisoned, draft, k=1))
    engine.scheduler.lag = lag
    slots = engine.worker.slots

    def propose(plan: Plan) -> list[int]:
        for each in plan.drawing:
            if each.max_drafts:
                slots.token_ids[each.slot, slots.num_tokens[each.slot]] = poison
        return [each.max_drafts for each in plan.scheduled]

    monkeypatch.setattr(engine.worker.proposer, "propose", propose)
    text = MIXED[1] + truth[1]
    # In the lagging engine drafts come after the first token. Either way the token before the draft
    # fills a page.
    lengths = {"spoilt": 44 - lag, "shares": 45}
    outputs: list[RequestOutput] = []
    for name, length in lengths.items():
        params = replace(GREEDY, max_tokens=len(text) - length)
        engine.submit([NewRequest(request_id=name, prompt_token_ids=text[:length], params=params)])
        outputs += [output for _ in range(1 + lag) for output in engine.step()]
    while engine.has_work():
        outputs += engine.step()
    for name, length in lengths.items():
        assert tokens([o for o in outputs if o.request_id == name]) == text[length:]
    engine.check_integrity()


def test_abort_frees_everything_at_once(target: Path, draft: Path) -> None:
    engine = Engine(engine_config(target, draft, max_num_seqs=2))
    new = [
        NewRequest(request_id=str(i), prompt_token_ids=MIXED[1], params=GREEDY) for i in range(4)
    ]
    engine.submit(new)
    engine.step()
    engine.abort(["0", "3", "unknown"])
    engine.check_integrity()
    engine.abort(["1", "2", "2"])
    assert not engine.has_work()
    assert engine.stats().pages_used == 0
    engine.check_integrity()


def test_a_full_queue_turns_a_group_away_whole(target: Path) -> None:
    engine = Engine(engine_config(target, max_num_seqs=2, max_queue_len=3))

    def group(name: str, n: int) -> list[NewRequest]:
        return [
            NewRequest(request_id=f"{name}{i}", prompt_token_ids=[1, 2], params=GREEDY)
            for i in range(n)
        ]

    engine.submit(group("a", 4))
    with pytest.raises(QueueFullError, match="4 wait"):
        engine.submit(group("b", 2))
    engine.submit(group("c", 1))
    while engine.has_work():
        engine.step()
    assert engine.stats().generation_tokens == 5 * GREEDY.max_tokens


def test_ids_in_use_are_refused(target: Path) -> None:
    engine = Engine(engine_config(target))
    a, b = (NewRequest(request_id=i, prompt_token_ids=[1], params=GREEDY) for i in "ab")
    engine.submit([a])
    for taken in ([b, a], [b, b]):
        with pytest.raises(InvalidRequestError, match="in use already"):
            engine.submit(taken)
    assert engine.stats().num_waiting == 1


@pytest.mark.parametrize(
    ("prompt", "change", "field"),
    [
        ([], {}, "prompt"),
        ([1, VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"min_p": 1.5}, "min_p"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"logprobs": 1000}, "logprobs"),
        ([1], {"logprobs": 0, "logprob_token_ids": (VOCAB,)}, "logprob_token_ids"),
        ([1], {"logprobs": 0, "logprob_token_ids": (0,) * 129}, "logprob_token_ids"),
        ([1], {"logprob_token_ids": (0,)}, "logprob_token_ids"),
    ],
)
def test_bad_input_is_refused_by_name(
    target: Path, prompt: list[int], change: dict[str, float], field: str
) -> None:
    engine = Engine(engine_config(target))
    bad = NewRequest(
        request_id="bad",
        prompt_token_ids=prompt,
        params=replace(GREEDY, **change),  # type: ignore[arg-type]
    )
    with pytest.raises(InvalidRequestError, match=f"^{field}"):
        engine.submit([bad])
    assert not engine.has_work()


def test_more_drafts_than_can_be_verified_are_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 33; it must be at most 32"):
        Engine(engine_config(target, target, k=33))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_can_have_an_engine(tiny_model: Tiny) -> None:
    config = engine_config(tiny_model("llama", seed=0), tiny_model("llama", seed=1))
    asked = prompts([5, 40, 12], VOCAB)
    try:
        on_second, on_first = (
            [tokens(out) for out in run(Engine(replace(config, device=device)), asked, GREEDY)]
            for device in ("cuda:1", "cuda:0")
        )
    finally:
        torch.cuda.set_device(0)
    assert on_second == on_first

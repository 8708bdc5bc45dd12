"""The whole engine on tiny models: its output is the target's own, whatever runs beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, engine_config, generate, prompts, run, tokens
from tiny_models import DEVICE, VOCAB, Tiny
from transformers import AutoModelForCausalLM

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.engine import Engine

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

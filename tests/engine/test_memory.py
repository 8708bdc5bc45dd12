"""Pages take what weights, graphs and the largest step leave of a GPU, and no more."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import DEVICE, VOCAB, Tiny
from torch import Tensor

from outrider.engine import logit_edits
from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.gpu_memory import OutOfDeviceMemoryError, left_bytes
from outrider.engine.models.groups import LayerGroup
from outrider.engine.plan import Plan
from outrider.engine.scoring import edited_sequences, scorer, verifier
from outrider.engine.seats import seated
from outrider.engine.start_up import naming_what_to_lower
from outrider.engine.state import slots
from outrider.engine.state.batch import HostBatch
from outrider.engine.state.phase import padded_sizes
from outrider.engine.worker import LaunchedStep
from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.verify.logprobs import Logprobs

GIB = 2**30


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "largest"),
    [
        # Logits of 6 seats with 32 drafts that were looked up are more than the rows of a step;
        # one seat leaves room for 16 prompt tokens.
        (6, 120, (1, 64, 64)),
        (6, 30, (3, 64, 64)),  # a sequence holds 30 rows
        (1, 120, (1, 64, 33 + 16)),
    ],
)
def test_the_largest_step_fills_its_rows_and_leaves_nothing(
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    max_model_len: int,
    largest: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(scorer, "MAX_PROMPT_LOGITS", 16)
    target, draft = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    config = engine_config(target, draft, k=3, max_num_seqs=max_num_seqs, max_queue_len=0)
    # It runs before anything is captured: graphs would write into the pages that it frees.
    engine = Engine(replace(config, max_model_len=max_model_len, enforce_eager=True))
    shapes = []  # sequences, rows and logits of the target's passes
    forward = engine.worker.pair.target.forward

    def recorded(batch: HostBatch) -> object:
        shapes.append(batch.shape)
        return forward(batch)

    monkeypatch.setattr(engine.worker.pair.target, "forward", recorded)
    before = [part[:-1].clone() for part in engine.worker.slots.state[:2]]  # the last is nobody's
    engine.worker.rehearse()
    n, (num_seqs, num_rows, num_logits) = max_num_seqs, largest
    # A verification of all, and a prompt: also with a row that gets no logits.
    gathers = [(num_seqs, num_rows, num_rows - 1)] if num_logits == num_rows else []
    assert shapes == [(n, 4 * n, n), *gathers, largest]
    for step in engine.worker.short_steps():
        step()
    assert {(n, n, n) for n in padded_sizes(max_num_seqs)} <= set(shapes)
    assert all(rows <= 64 for _, rows, _ in shapes)
    after = [part[:-1] for part in engine.worker.slots.state[:2]]
    assert all(torch.equal(*x) for x in zip(before, after, strict=True))
    assert engine.worker.slots.num_tokens[-1] == 0
    engine.check_integrity()


@pytest.mark.parametrize("proposer", ["draft_model", "suffix", "none"])
def test_the_largest_step_runs_with_more_seats_than_rows(tiny_model: Tiny, proposer: str) -> None:
    target, draft = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    config = engine_config(
        target,
        draft if proposer == "draft_model" else None,
        proposer=proposer,
        k=3,
        max_num_seqs=6,
        max_num_batched_tokens=4,
    )
    engine = Engine(replace(config, enforce_eager=True))
    engine.worker.rehearse()
    engine.check_integrity()


def test_seats_with_many_drafts_share_the_rows_that_are_verified(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_VERIFIED_ROWS", 30)
    target, draft = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    config = engine_config(target, draft, k=3, max_num_seqs=6)
    asked = prompts([5] * 7, VOCAB)
    answers = [tokens(outputs) for outputs in run(Engine(config), asked, GREEDY)]
    engine, counts = Engine(config), []
    verify = engine.worker.verify

    def counted(step: LaunchedStep) -> None:
        counts.append(sum(step.plan.num_drafts_np + 1))
        verify(step)

    monkeypatch.setattr(engine.worker, "verify", counted)
    outputs = run(engine, asked, GREEDY, predicted=answers)
    assert [tokens(each) for each in outputs] == answers
    assert 6 * 4 < max(counts) <= 30
    counts.clear()
    run(engine, asked[:1], GREEDY, predicted=answers[:1])
    assert max(counts) > 30 - 5 * 4  # alone it has what others would have been given


def test_who_gets_the_seat_of_a_preempted_sequence_has_a_row_that_is_verified(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_VERIFIED_ROWS", 8)
    config = engine_config(tiny_model("llama", seed=0), proposer="suffix", max_num_seqs=3)
    params = replace(GREEDY, max_tokens=20)
    predicted, other, left_out, waiting = prompts([5, 7, 30, 3], VOCAB)
    (answer,) = [tokens(outputs) for outputs in run(Engine(config), [predicted], params)]
    # So few that the other one finds no page once drafts have taken theirs.
    cache = replace(config.cache, num_pages=17)
    engine, counts = Engine(replace(config, cache=cache, max_model_len=56)), []
    engine.scheduler.lag = 0

    def new(name: str, prompt: list[int]) -> NewRequest:
        return NewRequest(request_id=name, prompt_token_ids=prompt, params=params)

    first = replace(new("predicted", predicted), predicted_token_ids=answer)
    engine.submit([first, new("other", other), new("left out", left_out)])
    engine.step()
    engine.submit([new("waiting", waiting)])
    drafting, schedule = engine.scheduler.drafting, engine.scheduler.schedule

    def scheduled() -> Plan:
        plan = schedule()
        counts.append(sum(each.max_drafts + 1 for each in plan.scheduled if each.emits))
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", scheduled)
    # A grammar that is slow is left out of most steps.
    monkeypatch.setattr(drafting, "taking_part", lambda all_: [r for r in all_ if r != left])
    left = engine.sequences.by_id["left out"]
    for _ in range(6):
        engine.step()
    assert engine.stats().preemptions > 0
    assert engine.sequences.by_id["waiting"].slot is not None
    assert max(counts) <= 8


def test_logits_are_edited_and_scored_in_pieces(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    config = engine_config(target, draft, k=3, max_num_seqs=6)
    config = replace(config, enforce_eager=True)  # graphs do not call `take_rows`
    asked = prompts([5, 9, 2, 7, 4, 11], VOCAB)
    edited = replace(GREEDY, frequency_penalty=0.5, logprobs=2)
    params = [edited, GREEDY, edited, replace(edited, logprob_token_ids=(3, 5, 8)), edited, edited]
    whole = run(Engine(config), asked, params)
    monkeypatch.setattr(verifier, "GATHERED_ROWS", 5)
    # Two sequences with all drafts of the model.
    monkeypatch.setattr(edited_sequences, "EDITED_ROWS", 11)
    engine, num_edited, num_scored = Engine(config), [], []
    take, gather = logit_edits.take_rows, verifier.gather_logprobs
    copies: list[weakref.ref[Tensor]] = []

    def is_only_copy(logits: Tensor) -> bool:
        copies[:] = [each for each in copies if each() is not None] + [weakref.ref(logits)]
        return len(copies) == 1

    def taken(logits: Tensor, rows: EditRows, is_edited: Tensor) -> Tensor:
        copied = take(logits, rows, is_edited)
        assert is_only_copy(copied)
        num_edited.append(len(copied))
        return copied

    def gathered(logits: Tensor, *args: Any) -> Logprobs:
        assert is_only_copy(logits)
        num_scored.append(len(logits))
        return gather(logits, *args)

    monkeypatch.setattr(logit_edits, "take_rows", taken)
    monkeypatch.setattr(verifier, "gather_logprobs", gathered)
    in_pieces = run(engine, asked, params)
    for one, other in zip(whole, in_pieces, strict=True):
        assert tokens(one) == tokens(other)
        assert [each.logprobs for each in one] == [each.logprobs for each in other]
    assert max(num_edited) == 2 * 4
    assert max(num_scored) == 5
    num_edited.clear()
    logits = torch.zeros(64, engine.worker.pair.target.vocab_size, device=DEVICE)
    engine.worker.verifier.rehearse(logits)
    # One of them may have drafts that were looked up.
    assert num_edited == [2 * 4 + engine.worker.slots.max_drafts]
    assert max(num_scored) == 5


def test_a_step_that_does_not_fit_says_what_to_lower(tmp_path: Path) -> None:
    with (
        pytest.raises(OutOfDeviceMemoryError, match="lower scheduler"),
        naming_what_to_lower(engine_config(tmp_path)),
    ):
        raise torch.cuda.OutOfMemoryError("tried to allocate 2 GiB")


@pytest.mark.parametrize("part", ["ModelPair", "build_proposer"])
def test_models_that_do_not_fit_are_said_to_be_too_large(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def load(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    # A draft's distributions take gigabytes of many sequences.
    monkeypatch.setattr(f"outrider.engine.worker.{part}", load)
    said = (
        r"models do not fit .* take smaller .* fewer sequences \(scheduler.max_num_seqs\) .* 2 GiB"
    )
    with pytest.raises(OutOfDeviceMemoryError, match=said):
        Engine(engine_config(tiny_model("llama", seed=0)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], torch.device]:
    """`gpu(free_gib, reserved_gib)`: one of 80 GiB."""

    def made(free_gib: float, reserved_gib: float) -> torch.device:
        free_bytes, reserved_bytes = int(free_gib * GIB), int(reserved_gib * GIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved_bytes)
        return torch.device("cuda")

    return made


Gpu = Callable[[float, float], torch.device]


def test_pages_get_this_engines_share_less_what_it_has_taken(gpu: Gpu) -> None:
    device = gpu(55, 24)
    assert left_bytes(device, 0.75, step_bytes=5 * GIB, freed_bytes=4 * GIB) == (60 - 20 - 5) * GIB


def test_what_others_hold_is_not_given_away(gpu: Gpu) -> None:
    device = gpu(8, 20)
    assert left_bytes(device, 0.75, step_bytes=4 * GIB, freed_bytes=2 * GIB) == (10 - 4) * GIB


def test_no_memory_left_is_reported_in_numbers(gpu: Gpu) -> None:
    with pytest.raises(
        OutOfDeviceMemoryError, match=r"allows 24\.00 GiB.* take 20\.00 .* step 5\.00; 59\.00"
    ):
        left_bytes(gpu(59, 20), 0.3, step_bytes=5 * GIB, freed_bytes=0)


def test_a_cache_that_does_not_fit_is_reported_in_numbers(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(group: LayerGroup, index: int, num_pages: int, page_size: int) -> None:
        raise torch.OutOfMemoryError("nothing is free")

    monkeypatch.setattr(LayerGroup, "bind", full)
    with pytest.raises(
        ValueError, match=r"(512|1) pages takes 0\.00 GiB.*num_pages.*nothing is free"
    ):
        Engine(engine_config(tiny_model("llama", seed=0)))


@pytest.fixture
def share() -> float:
    """Of the GPU, for one engine: 0.02 beside what others of this process hold."""
    gc.collect()
    torch.cuda.empty_cache()
    return 0.02 + torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_an_engine_keeps_to_its_share_under_full_load(tiny_model: Tiny, share: float) -> None:
    config = engine_config(
        tiny_model("llama", seed=0), tiny_model("llama", seed=1), num_pages=None, page_size=4096
    )
    before_bytes, (_, total_bytes) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    engine = Engine(replace(config, gpu_memory_utilization=share))
    run(engine, prompts([60] * 40, VOCAB), replace(GREEDY, repetition_penalty=1.2, logprobs=3))
    taken_bytes = torch.cuda.memory_reserved() - before_bytes
    assert 0.01 * total_bytes < taken_bytes <= 0.0205 * total_bytes
    assert engine.info.cache_bytes > 0.5 * taken_bytes


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_requests_find_their_kernels_compiled(
    tiny_model: Tiny, share: float, compiled_kernels: list[str]
) -> None:
    config = engine_config(
        tiny_model("llama", seed=0), tiny_model("llama", seed=1), num_pages=None, max_num_seqs=40
    )
    scheduling = replace(config.scheduler, max_num_batched_tokens=1024)
    engine = Engine(replace(config, gpu_memory_utilization=share, scheduler=scheduling))
    assert compiled_kernels
    compiled_kernels.clear()
    sampled = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, logprobs=3)
    asks = [
        GREEDY,
        replace(GREEDY, prompt_logprobs=2, num_speculative_tokens=1),
        replace(sampled, verification="block", top_k=20, num_speculative_tokens=0),
        replace(sampled, verification="match", min_p=0.1, min_tokens=3),
        replace(sampled, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={3: 2.0}),
        replace(sampled, bad_words=((4, 5), (6,)), allowed_token_ids=tuple(range(30))),
    ]
    for num_seqs, longest in ((1, 90), (3, 20), (40, 1), (17, 12), (40, 40), (90, 90)):
        for num_asking in (1, len(asks)):
            lens = [1 + 7 * i % longest for i in range(num_seqs)]
            run(engine, prompts(lens, VOCAB), [asks[i % num_asking] for i in range(num_seqs)])
    assert not compiled_kernels


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_an_engine_that_was_used_before_is_freed_before_memory_is_measured(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(tiny_model("llama", seed=0), max_num_seqs=2)
    gc.disable()  # until the engine asks for it
    try:
        used = weakref.ref(Engine(config).worker.pair.target)
        assert used() is not None

        def measured(config: EngineConfig, *args: Any) -> EngineConfig:
            assert used() is None
            return seated(config, *args)

        monkeypatch.setattr("outrider.engine.worker.seated", measured)
        Engine(config)
    finally:
        gc.enable()

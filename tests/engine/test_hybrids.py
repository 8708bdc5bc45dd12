"""Targets of which most layers keep a state in place of KV, which cannot go back: Qwen3.5 and
its mixtures, Nemotron 3, and Granite 4.

test_random_comparison.py has one among its kinds: any mixture of sequences, to the bit.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, is_greedy, lagging, prompts, run, tokens
from mtp import as_published
from tiny_models import DEVICE, VOCAB, Tiny

from outrider.engine import seats
from outrider.engine.api import ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models.groups import LayerGroup
from outrider.engine.models.pair import ModelPair
from outrider.engine.start_up import OutOfDeviceMemoryError

K = 4


def deep(*case: Any) -> Any:
    """What another test guards, too."""
    return pytest.param(*case, marks=pytest.mark.deep)


@pytest.fixture
def target(tiny_model: Tiny) -> Path:
    return tiny_model("qwen3_5_text")


def answers(
    engine: Engine, target: Path, asked: list[list[int]], predicted: list[list[int]] | None = None
) -> list[list[int]]:
    """Greedy answers, which must be transformers' own."""
    found = [tokens(outputs) for outputs in run(engine, asked, GREEDY, predicted)]
    for prompt, answer in zip(asked, found, strict=True):
        assert len(answer) == GREEDY.max_tokens
        assert is_greedy(target, prompt, answer)
    return found


def with_mistakes(answer: list[int], *, every: int) -> list[int]:
    return [(t + 1) % VOCAB if i % every == every - 1 else t for i, t in enumerate(answer)]


def test_greedy_answers_are_the_targets_own(target: Path) -> None:
    """Of prompts around the edges of pages and chunks, and in several chunks."""
    answers(Engine(engine_config(target)), target, prompts([1, 4, 5, 63, 65], VOCAB))


@pytest.mark.parametrize(
    ("lag", "architecture"),
    [
        (0, "qwen3_5_text"),
        (1, "qwen3_5_text"),
        (1, "nemotron_h"),
        deep(1, "qwen3_5_moe_text"),  # test_random_comparison.py
        deep(1, "granitemoehybrid"),
    ],
)
def test_any_number_of_drafts_may_be_accepted(
    lag: int, architecture: str, tiny_model: Tiny
) -> None:
    target = tiny_model(architecture)
    asked = prompts([5, 9, 2, 14, 7], VOCAB)
    right = answers(Engine(engine_config(target)), target, asked)
    engine = Engine(engine_config(target, proposer="suffix", k=K))
    engine.scheduler.lag = lag
    accepted, commit = set(), engine.committer._commit_drawn

    def counted(scheduled):  # type: ignore[no-untyped-def]
        if scheduled.num_drafts:
            accepted.add((scheduled.num_drafts, len(scheduled.token_ids) - 1))
        return commit(scheduled)

    engine.committer._commit_drawn = counted  # type: ignore[method-assign]
    predicted = [with_mistakes(a, every=n) for a, n in zip(right, (2, 4, 5, 6, 7), strict=True)]
    assert answers(engine, target, asked, predicted) == right
    assert {count for _, count in accepted} >= {0, 1, 2, 3, 4}
    assert any(count < drafted for drafted, count in accepted if count)


@pytest.mark.parametrize(
    "architecture",
    ["qwen3_5_text", deep("nemotron_h")],  # test_random_comparison.py
)
def test_a_model_may_draft_for_it(architecture: str, tiny_model: Tiny) -> None:
    """Whose KV lies in the same pages, and which falls behind and catches up."""
    target = tiny_model(architecture)
    engine = lagging(engine_config(target, tiny_model("qwen3"), k=K))
    answers(engine, target, prompts([5, 30, 1, 70], VOCAB))
    assert engine.stats().drafted_per_position[0] > 20


def test_a_preempted_sequence_starts_over(target: Path) -> None:
    engine = Engine(engine_config(target, num_pages=30, proposer="suffix"))
    answers(engine, target, prompts([30, 25, 31, 28], VOCAB))
    assert engine.stats().preemptions > 0


def test_states_are_counted(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(engine_config(target, proposer="suffix", max_num_seqs=3))
    target_model = engine.worker.pair.target
    kept = [tensor for state in target_model.states for tensor in state.memory]  # type: ignore[attr-defined]
    assert engine.info.state_bytes == target_model.slot_memory.nbytes
    assert sum(tensor.nbytes for tensor in kept) <= engine.info.state_bytes
    # Of three sequences, of padding, and of three prefixes.
    assert [len(tensor) for tensor in kept] == 2 * [7, 7, 7]
    # They come before pages.
    if DEVICE.type == "cpu":
        monkeypatch.setattr("outrider.engine.seats.available_bytes", lambda: 1_200_000)
        with pytest.raises(
            OutOfDeviceMemoryError, match=r"states of 32 sequences and of prefixes take .* lower"
        ):
            Engine(engine_config(target, num_pages=None))


def step_bytes(vocab_size: int) -> int:
    """What a GPU keeps for graphs and the largest step before it has seats."""
    return 2**30 + 8_400 * vocab_size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("num_fitting", "caches_prefixes", "given", "expected"),
    [
        (5, True, {}, 5),
        (5, False, {}, 5),
        (500, True, {}, 256),  # no more than the device makes use of
        (0, True, {}, 1),  # then what does not fit says so
        (5, True, {"may_lower_seqs": False}, 256),  # somebody has asked for so many
    ],
)
def test_no_more_sequences_run_than_half_of_the_memory_has_states_for(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    num_fitting: int,
    caches_prefixes: bool,
    given: dict[str, bool],
    expected: int,
) -> None:
    config = engine_config(target, num_pages=None, prefix_caching=caches_prefixes, max_num_seqs=256)
    pair = ModelPair(config, ignore_progress)
    num_states = 2 * num_fitting if caches_prefixes else num_fitting
    room_bytes = 2 * num_states * pair.target.bytes_per_slot(32) + 1
    monkeypatch.setattr(seats, "left_for_caches", lambda _: room_bytes)
    monkeypatch.setattr(seats, "left_bytes", lambda *_, **__: room_bytes + step_bytes(VOCAB))
    scheduler = replace(config.scheduler, **{"may_lower_seqs": True, **given})
    config = replace(config, scheduler=scheduler)
    seated = seats.seated(config, pair, torch.device(device), 32)
    assert seated.scheduler.max_num_seqs == expected


@pytest.mark.parametrize(("vocab_size", "expected"), [(248_320, 1), (65_536, 8)])
def test_a_step_takes_less_room_from_states_with_a_smaller_vocabulary(
    target: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, expected: int
) -> None:
    config = engine_config(target, num_pages=None, max_num_seqs=64)
    pair = ModelPair(config, ignore_progress)
    monkeypatch.setattr(pair, "vocab_size", vocab_size)
    monkeypatch.setattr(pair.target, "bytes_per_slot", lambda _: 40 * 2**20)
    monkeypatch.setattr(seats, "left_bytes", lambda *_, **__: int(2.8 * 2**30))  # of a GPU of 4 GB
    config = replace(config, scheduler=replace(config.scheduler, may_lower_seqs=True))
    seated = seats.seated(config, pair, torch.device("cuda"), 32)
    assert seated.scheduler.max_num_seqs == expected


def test_windows_of_a_head_are_counted_with_the_states_of_a_sequence(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(target, num_pages=None, max_num_seqs=32)
    scheduler = replace(config.scheduler, may_lower_seqs=True)
    config = replace(config, scheduler=scheduler)
    pair = ModelPair(config, ignore_progress)
    windowed = LayerGroup(64, pair.groups[0].layers)
    window_bytes = 64 * windowed.spec.bytes_per_token
    pair.groups.append(windowed)
    of_each = 2 * pair.target.bytes_per_slot(32) + window_bytes
    monkeypatch.setattr(seats, "left_for_caches", lambda _: 2 * 20 * of_each)
    assert seats.seated(config, pair, torch.device("cpu"), 32).scheduler.max_num_seqs == 20


def test_an_engine_has_as_many_seats_as_its_states_have_room_for(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(target, proposer="suffix", max_num_seqs=32)
    state_bytes = Engine(config).worker.pair.target.bytes_per_slot(32)
    monkeypatch.setattr(seats, "left_for_caches", lambda _: 2 * 2 * 3 * state_bytes)
    left_bytes = 2 * 2 * 3 * state_bytes + step_bytes(VOCAB)
    monkeypatch.setattr(seats, "left_bytes", lambda *_, **__: left_bytes)
    scheduler = replace(config.scheduler, may_lower_seqs=True)
    engine = Engine(replace(config, scheduler=scheduler))
    assert engine.info.max_num_seqs == 3
    assert len(answers(engine, target, prompts([30, 25, 31, 28], VOCAB))) == 4
    engine.check_integrity()


@pytest.mark.parametrize("architecture", [deep("qwen3_5_text"), "qwen3_5_moe_text"])
def test_the_text_of_a_model_that_reads_images_is_served(
    architecture: str, tiny_model: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_model(architecture)
    asked = prompts([9], VOCAB)
    expected = answers(Engine(engine_config(target)), target, asked)
    engine = Engine(engine_config(as_published(target, tmp_path / "published")))
    assert [tokens(outputs) for outputs in run(engine, asked, GREEDY)] == expected
    assert "not read" not in caplog.text

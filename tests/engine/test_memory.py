"""Pages take what weights, graphs and the largest step leave of a GPU, and no more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run
from tiny_models import DEVICE, VOCAB

from outrider.engine import memory
from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.memory import OutOfDeviceMemoryError, left_bytes, run_largest_step
from outrider.engine.models.paged_model import PagedModel
from outrider.engine.scheduling import scheduler
from outrider.engine.state.batch import HostBatch

Tiny = Callable[..., Path]
GIB = 2**30
# Of 16, 8 and 4 rows a sequence, one of them a draft, as far as a step of 64 rows has room.
SHORT_ALONE = [(1, 16, 2), (1, 8, 2), (1, 4, 2)]
SHORT = [
    *[(6, 64, 10), (6, 48, 12), (6, 24, 12)],
    *[(n, n * rows, 2 * n) for n in (4, 2) for rows in (16, 8, 4)],
    *SHORT_ALONE,
]


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "expected"),
    [
        # Of 6 seats 4 decode with 3 drafts, one has its prompt of 17 scored, one fills the step.
        (6, 120, [(1, 64, 1), *SHORT, (4, 16, 16), (6, 64, 4 * 4 + 16 + 4)]),
        # A prompt holds 29 tokens: three fill a step, or two beside the others.
        (6, 30, [(3, 64, 3), *SHORT, (2, 8, 8), (5, 64, 2 * 4 + 16 + 4 + 1)]),
        (1, 120, [(1, 64, 1), *SHORT_ALONE, (1, 20, 16 + 4)]),
    ],
)
def test_the_largest_step_fills_its_rows_and_leaves_nothing(
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    max_model_len: int,
    expected: list[tuple[int, int, int]],
) -> None:
    monkeypatch.setattr(scheduler, "MAX_PROMPT_LOGITS", 16)
    monkeypatch.setattr(memory, "MAX_PROMPT_LOGITS", 16)
    target, draft = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    config = engine_config(target, draft, k=3, max_num_seqs=max_num_seqs, max_queue_len=0)
    # It runs before anything is captured: graphs would write into the pages that it frees.
    engine = Engine(replace(config, max_model_len=max_model_len, enforce_eager=True))
    shapes = []  # sequences, rows and logits of the target's passes
    forward = engine.worker.scorer._model.forward

    def recorded(batch: HostBatch) -> torch.Tensor:
        shapes.append(batch.shape)
        return forward(batch)

    allocate = engine.allocate

    def planned_as_on_a_cpu(num_pages: int, max_model_len: int) -> None:
        allocate(num_pages, max_model_len)
        engine.lag = 0  # a GPU drafts for no first token

    monkeypatch.setattr(engine, "allocate", planned_as_on_a_cpu)
    monkeypatch.setattr(engine.worker.scorer._model, "forward", recorded)
    run_largest_step(engine, engine.worker.pair, config)
    assert shapes == expected
    assert not engine.has_work()
    engine.check_integrity()


def test_the_largest_step_runs_with_more_seats_than_rows(tiny_model: Tiny) -> None:
    target, draft = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    config = engine_config(target, draft, k=3, max_num_seqs=6, max_num_batched_tokens=4)
    engine = Engine(replace(config, enforce_eager=True))
    run_largest_step(engine, engine.worker.pair, config)
    assert not engine.has_work()
    engine.check_integrity()


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


def test_no_memory_left_is_told_in_numbers(gpu: Gpu) -> None:
    with pytest.raises(
        OutOfDeviceMemoryError, match=r"allows 24\.00 GiB.* take 20\.00 .* step 5\.00; 59\.00"
    ):
        left_bytes(gpu(59, 20), 0.3, step_bytes=5 * GIB, freed_bytes=0)


def test_a_cache_that_does_not_fit_is_told_in_numbers(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("nothing is free")

    monkeypatch.setattr(PagedModel, "bind_cache", full)
    with pytest.raises(ValueError, match=r"512 pages takes 0\.00 GiB.*num_pages.*nothing is free"):
        Engine(engine_config(tiny_model("llama", seed=0)))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_an_engine_keeps_to_its_share_under_full_load(tiny_model: Tiny) -> None:
    config = engine_config(
        tiny_model("llama", seed=0), tiny_model("llama", seed=1), num_pages=None, page_size=4096
    )
    torch.cuda.empty_cache()
    before_bytes, (_, total_bytes) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    engine = Engine(replace(config, gpu_memory_utilization=0.02))
    run(engine, prompts([60] * 40, VOCAB), replace(GREEDY, repetition_penalty=1.2, logprobs=3))
    taken_bytes = torch.cuda.memory_reserved() - before_bytes
    assert 0.01 * total_bytes < taken_bytes <= 0.0205 * total_bytes
    assert engine.info.cache_bytes > 0.5 * taken_bytes


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_requests_find_their_kernels_compiled(
    tiny_model: Tiny, compiled_kernels: list[str]
) -> None:
    config = engine_config(
        tiny_model("llama", seed=0), tiny_model("llama", seed=1), num_pages=None, max_num_seqs=40
    )
    scheduling = replace(config.scheduler, max_num_batched_tokens=1024)
    engine = Engine(replace(config, gpu_memory_utilization=0.02, scheduler=scheduling))
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

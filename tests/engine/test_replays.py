"""Thousands of steps in which requests come and go: every one gets its own tokens each time."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import GREEDY, engine_config, generate, prompts
from tiny_models import DEVICE, VOCAB
from torch import Tensor

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.state.phase import Phase, Shape

NUM_REQUESTS = 3000


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU, where every step replays graphs")
@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_requests_that_come_at_any_time_get_their_own_tokens(
    proposer: str, tiny_model: Callable[..., Path]
) -> None:
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1) if proposer == "draft_model" else None
    engine = Engine(
        engine_config(target, draft, k=3, proposer=proposer, max_num_seqs=10, num_pages=160)
    )
    asked = prompts([3, 40, 1, 17, 8, 66], VOCAB)
    # Of greedy requests the model's own tokens; of sampled ones, whose draws are fixed by their
    # seeds, what the first to come were given.
    truth: dict[tuple[int, int | None], list[int]] = {
        (i, None): generate(target, prompt, 24) for i, prompt in enumerate(asked)
    }
    rng = random.Random(0)
    live: dict[str, tuple[int, SamplingParams, list[int]]] = {}
    submitted = num_steps = num_checked = 0
    while submitted < NUM_REQUESTS or live:
        while submitted < NUM_REQUESTS and len(live) < 14 and rng.random() < 0.4:
            which, k = rng.randrange(len(asked)), rng.randrange(4)
            params = replace(GREEDY, max_tokens=rng.randint(1, 24), num_speculative_tokens=k)
            if rng.random() < 0.5:
                params = replace(
                    params, temperature=0.9, verification="match", seed=rng.randrange(5)
                )
            request_id = str(submitted)
            submitted += 1
            engine.submit(
                [NewRequest(request_id=request_id, prompt_token_ids=asked[which], params=params)]
            )
            live[request_id] = which, params, []
        for output in engine.step():
            which, params, found = live[output.request_id]
            found += output.token_ids
            if output.finish_reason is None:
                continue
            assert output.finish_reason == "length"
            del live[output.request_id]
            key = which, params.seed if params.temperature > 0 else None
            known = truth.setdefault(key, found)
            shared = min(len(found), len(known))
            assert found[:shared] == known[:shared], key
            truth[key] = max(known, found, key=len)
            num_checked += 1
        num_steps += 1
        if live and rng.random() < 0.01:
            gone = rng.choice([*live])
            engine.abort([gone])
            del live[gone]
    engine.check_integrity()
    assert engine.stats().pages_used == 0
    assert num_steps > 1.2 * NUM_REQUESTS
    assert num_checked > 0.8 * NUM_REQUESTS


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("only_in_capture", [False, True])
@torch.inference_mode()
def test_a_capture_without_memory_leaves_a_gpu_on_which_others_go_on(
    only_in_capture: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, whole_bytes = torch.cuda.mem_get_info()

    def body(integers: Tensor, shape: Shape) -> Tensor:
        is_full = shape[0] > 8 and (not only_in_capture or torch.cuda.is_current_stream_capturing())
        room = torch.empty(2 * whole_bytes if is_full else 8, dtype=torch.int64, device=DEVICE)
        return room[:8].copy_(integers) + shape[0]

    passes: Phase[Tensor] = Phase(body, DEVICE)
    stream = torch.cuda.current_stream()
    numbers = np.arange(8)
    for size in (16, 8, 4):
        passes.capture(numbers, (size,))
    assert [*passes.captured] == [(8,), (4,)]
    assert torch.cuda.current_stream() == stream
    assert len(caplog.records) == 1
    for size in (8, 4):
        assert passes(numbers * 2, (size,)).tolist() == (numbers * 2 + size).tolist()

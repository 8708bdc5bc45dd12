"""Random and extreme sequences, aborted at random, in little memory: no step fails, no page leaks.

TEST_EXAMPLES=2000 asks for that many.
"""

import os
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from engines import engine_config
from random_sequences import MAX_MODEL_LEN, offers, random_request
from tiny_models import VOCAB

from outrider.engine.api import InvalidRequestError, NewRequest, RequestOutput, SamplingParams
from outrider.engine.engine import Engine

NUM_REQUESTS = int(os.environ.get("TEST_EXAMPLES", "50"))
FIELDS = {field.name for field in fields(SamplingParams)} | {"prompt"}
# Ends that a request brings on itself.
DEAD_ENDS = ("it left no token", "no token can go on", "text is complete")


@pytest.fixture(scope="module")
def engine_of(tiny_model: Callable[..., Path]) -> Callable[[str], Engine]:
    def make(proposer: str) -> Engine:
        config = engine_config(
            tiny_model("llama", seed=0),
            tiny_model("llama", seed=0, num_hidden_layers=1) if proposer == "draft_model" else None,
            proposer=proposer,
            k=3,
            num_pages=28,
            max_num_seqs=8,
            max_num_batched_tokens=32,
        )
        return Engine(offers(config))

    return make


def assert_is_valid(new: NewRequest, outputs: list[RequestOutput]) -> None:
    last = outputs[-1]
    num_tokens = sum(len(output.token_ids) for output in outputs)
    params = new.params
    assert num_tokens <= max(params.max_tokens, 0)
    for output in outputs:
        assert all(0 <= token_id < VOCAB for token_id in output.token_ids)
        asked = params.logprobs is not None
        assert len(output.logprobs or ()) == (len(output.token_ids) if asked else 0)
    if last.finish_reason == "error":
        assert any(words in (last.error or "") for words in DEAD_ENDS), (new, last)
        return
    if last.finish_reason == "stop":
        is_complete = params.grammar is not None and last.stop_token_id is None
        assert is_complete or last.token_ids[-1] == last.stop_token_id
        yields = params.grammar or params.allowed_token_ids or params.bad_words
        assert yields or num_tokens >= params.min_tokens
    else:
        assert last.finish_reason == "length"
        room = min(params.max_tokens, MAX_MODEL_LEN - len(new.prompt_token_ids))
        assert num_tokens == room
    if params.prompt_logprobs is not None:
        num_scored = sum(len(output.prompt_logprobs or ()) for output in outputs)
        assert num_scored == len(new.prompt_token_ids) - 1


@pytest.mark.parametrize("proposer", ["draft_model", "suffix", "none"])
def test_no_mixture_of_parameters_breaks_the_loop(
    engine_of: Callable[[str], Engine], proposer: str
) -> None:
    rng = random.Random(NUM_REQUESTS)
    engine = engine_of(proposer)
    live: dict[str, NewRequest] = {}
    outputs: dict[str, list[RequestOutput]] = {}
    refusals: list[str] = []
    num_finished = submitted = 0
    while submitted < NUM_REQUESTS or live:
        while submitted < NUM_REQUESTS and len(live) < 20 and rng.random() < 0.7:
            new = random_request(rng, submitted)
            submitted += 1
            try:
                engine.submit([new])
            except InvalidRequestError as error:
                refusals.append(str(error))
                continue
            live[new.request_id], outputs[new.request_id] = new, []
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                assert_is_valid(live.pop(output.request_id), outputs.pop(output.request_id))
                num_finished += 1
        if live and rng.random() < 0.02:
            gone = rng.choice([*live])
            engine.abort([gone])
            del live[gone], outputs[gone]
        engine.check_integrity()
    assert not engine.has_work()
    stats = engine.stats()
    assert (stats.pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.preemptions > 0
    assert len(refusals) > NUM_REQUESTS / 20
    assert {refusal.split(":")[0] for refusal in refusals} <= FIELDS
    assert num_finished > NUM_REQUESTS / 4

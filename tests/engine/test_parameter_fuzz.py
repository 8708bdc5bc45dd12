"""Random and extreme sequences, aborted at random, in little memory: no step fails, no page leaks.

TEST_EXAMPLES=2000 asks for that many.
"""

import os
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from engines import engine_config
from grammars import stands_for
from tiny_models import VOCAB

from outrider.engine.api import (
    InvalidRequestError,
    NewRequest,
    ProcessorChoice,
    RequestOutput,
    SamplingParams,
)
from outrider.engine.engine import Engine

NUM_REQUESTS = int(os.environ.get("TEST_EXAMPLES", "80"))
EOS = VOCAB - 1
FIELDS = {field.name for field in fields(SamplingParams)} | {"prompt"}
# Ends that a request brings on itself.
DEAD_ENDS = ("it left no token", "no token can go on", "text is complete")
INFINITE, NAN = float("inf"), float("nan")


def some_ids(rng: random.Random, most: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB + (rng.random() < 0.02)) for _ in range(rng.randint(0, most)))


def random_params(rng: random.Random) -> SamplingParams:
    pick = rng.choice
    choices: dict[str, Callable[[], Any]] = {
        "max_tokens": lambda: pick([0, 1, 2, 30, 10**9, -1]),
        "temperature": lambda: pick([0.0, 1e-45, 1e-6, 0.5, 3.0, 1e30, 1e39, -1.0, NAN]),
        "top_k": lambda: pick([0, 1, 7, VOCAB, 2**31 - 1, 2**31, -1]),
        "top_p": lambda: pick([1e-30, 0.5, 1 - 1e-7, 1.0, 0.0, NAN]),
        "min_p": lambda: pick([0.0, 1e-30, 0.5, 1.0, 1.1]),
        "seed": lambda: pick([0, 2**63, 2**64 - 1, 2**64, -1]),
        "presence_penalty": lambda: pick([-2.0, 0.1, 2.0, 2.1, NAN]),
        "frequency_penalty": lambda: pick([-2.0, 0.1, 2.0, -INFINITE]),
        "repetition_penalty": lambda: pick([1e-6, 0.5, 2.0, 1e6, 0.0, 1e7]),
        "logit_bias": lambda: {
            i: pick([-3e38, -5.0, 5.0, 3e38, 1e39, NAN]) for i in some_ids(rng, 3)
        },
        "allowed_token_ids": lambda: some_ids(rng, 30),
        "bad_words": lambda: tuple(some_ids(rng, 3) for _ in range(rng.randint(0, 20))),
        "min_tokens": lambda: pick([0, 1, 5, 10**9, -1]),
        "stop_token_ids": lambda: some_ids(rng, 5),
        "ignore_eos": lambda: True,
        "logits_processors": lambda: pick(
            [(ProcessorChoice("parity", {}),), (ProcessorChoice("nobody", {}),)]
        ),
        "logprobs": lambda: pick([0, 1, 20, 129, -1]),
        "prompt_logprobs": lambda: pick([0, 1, 20, 129, -1]),
        "num_speculative_tokens": lambda: pick([0, 1, 3, 10**9, -1]),
        "verification": lambda: pick(["token", "block", "match"]),
        "grammar": lambda: pick(["start: /[abc]{2,9}/", 'start: "ab" | "c"', "start: /[ab]*/"]),
    }
    share = pick([0.03, 0.1, 0.3])
    asked = {name: value() for name, value in choices.items() if rng.random() < share}
    return replace(SamplingParams(max_tokens=pick([4, 40])), **asked)


def random_request(rng: random.Random, number: int) -> NewRequest:
    length = rng.choice([1, 2, 4, 5, 17, 33, 60])
    # Few beginnings, so that sequences share pages.
    prompt = [*([rng.randrange(2)] * (length - 1)), rng.randrange(VOCAB)]
    if rng.random() < 0.03:
        prompt = rng.choice([[], [VOCAB], [-1], [0] * 1000])
    return NewRequest(
        request_id=str(number),
        prompt_token_ids=prompt,
        params=random_params(rng),
        priority=rng.choice([0, 0, -1, 2**62]),
        cache_salt=rng.choice(["", "", "a"]),
    )


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
        letters = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(VOCAB - 1)]
        return Engine(
            replace(
                config,
                token_table=stands_for(*letters),
                eos_token_ids=(EOS,),
                max_model_len=100,
                logits_processors=("parity = logits_processors:FavourParity",),
            )
        )

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
        assert num_tokens >= params.min_tokens
        assert last.token_ids[-1] == last.stop_token_id
    else:
        assert last.finish_reason == "length"
        room = min(params.max_tokens, 100 - len(new.prompt_token_ids))
        assert num_tokens == room
    if params.prompt_logprobs is not None:
        num_scored = sum(len(output.prompt_logprobs or ()) for output in outputs)
        assert num_scored == len(new.prompt_token_ids) - 1


@pytest.mark.parametrize("proposer", ["draft_model", "ngram", "none"])
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

"""Sequences with any mixture of parameters: usual, extreme and impossible. For an engine that has
`offers`.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from grammars import stands_for
from tiny_models import VOCAB

from outrider.engine.api import NewRequest, ProcessorChoice, SamplingParams, ThinkingBudget
from outrider.engine.config import EngineConfig

MAX_MODEL_LEN = 100
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
            i: pick([-1e30, -5.0, 5.0, 1e30, 1e39, NAN]) for i in some_ids(rng, 3)
        },
        "allowed_token_ids": lambda: some_ids(rng, 30),
        "bad_words": lambda: tuple(some_ids(rng, 3) for _ in range(rng.randint(0, 20))),
        "min_tokens": lambda: pick([0, 1, 5, 10**9, -1]),
        "stop_token_ids": lambda: some_ids(rng, 5),
        "ignore_eos": lambda: True,
        "logits_processors": lambda: pick(
            [(ProcessorChoice("parity", {}),), (ProcessorChoice("nobody", {}),)]
        ),
        "thinking": lambda: ThinkingBudget(
            num_tokens=pick([0, 1, 4, 20, 2**63 - 1, -1]),
            open_token_id=rng.randrange(2),  # prompts are of these
            close_token_id=pick([2, VOCAB - 1, rng.randrange(VOCAB), VOCAB]),
            num_opening=pick([0, 1, -1]),
            begun=rng.random() < 0.7,
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


def offers(config: EngineConfig, vocab_size: int = VOCAB) -> EngineConfig:
    """The configuration with all that such sequences may ask for."""
    letters = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(vocab_size - 1)]
    return replace(
        config,
        token_table=stands_for(*letters),
        eos_token_ids=(vocab_size - 1,),
        max_model_len=MAX_MODEL_LEN,
        logits_processors=("parity = logits_processors:FavourParity",),
    )

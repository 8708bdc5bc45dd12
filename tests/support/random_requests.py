"""Requests with any mixture of parameters: usual, extreme and impossible."""

import random
from collections.abc import Callable
from typing import Any

Thunk = Callable[[], Any]
NUM_TOKENS = 300  # of the tests' tokenizer there are a few more
JUNK = (None, "x", "", -1, 0.5, 10**30, 1e308, True, [], ["x"], {}, {"x": 1}, [[]], "é" * 3000)


def random_ids(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, most))]


def sampling_fields(rng: random.Random) -> dict[str, Thunk]:
    """By name, how to come by a value that may be asked for; some are out of range."""
    pick = rng.choice
    return {
        "n": lambda: pick([1, 2, 3, 1000]),
        "temperature": lambda: pick([0, 1e-300, 1e-6, 0.5, 1, 100, 101]),
        "top_p": lambda: pick([0, 1e-300, 0.5, 1, 1.1]),
        "top_k": lambda: pick([-1, 0, 1, 5, 10**9]),
        "min_p": lambda: pick([0, 0.3, 1, -0.1]),
        "presence_penalty": lambda: pick([-2, 0.5, 2, 2.5]),
        "frequency_penalty": lambda: pick([-2, 0.5, 2, -3]),
        "repetition_penalty": lambda: pick([1e-300, 1e-6, 0.5, 1.2, 1e6, 1e300, 0]),
        "logit_bias": lambda: {
            str(i): pick([-1e30, -100, 3, 100, 1e30]) for i in random_ids(rng, 9)
        },
        "allowed_token_ids": lambda: random_ids(rng, 40),
        "bad_words": lambda: pick([["the"], ["Hello world", "e", "🙂"], ["x"] * 128]),
        "min_tokens": lambda: pick([0, 1, 3, 7, 10**9]),
        "seed": lambda: pick([0, -1, 2**63 - 1, -(2**63), 2**63]),
        "stop": lambda: pick(["e", ["a", " the"], [], "\ufffd", ["x"] * 17]),
        "stop_token_ids": lambda: random_ids(rng, 5),
        "ignore_eos": lambda: True,
        "include_stop_str_in_output": lambda: True,
        "skip_special_tokens": lambda: False,
        "spaces_between_special_tokens": lambda: False,
        "detokenize": lambda: False,
        "truncate_prompt_tokens": lambda: pick([-1, 1, 3, 10**9]),
        "prompt_logprobs": lambda: pick([0, 1, 20, 21]),
        "prediction": lambda: {"type": "content", "content": pick(["", "The end.", "x " * 999])},
        "cache_salt": lambda: pick(["a", "b", "\U0001f642"]),
        "priority": lambda: pick([-(2**63), -1, 0, 5, 2**63 - 1]),
        "return_token_ids": lambda: True,
        "return_tokens_as_token_ids": lambda: True,
        "structured_outputs": lambda: pick(
            [{"regex": "[a-f]{1,8}"}, {"choice": ["yes", "no"]}, {"json": {"type": "integer"}}]
        ),
        "speculation": lambda: {
            "num_speculative_tokens": pick([0, 1, 2, 9, 32, 10**6]),
            "verification": pick(["token", "block", "match"]),
        },
        "stream": lambda: rng.random() < 0.5,
    }


def completion_fields(rng: random.Random) -> dict[str, Thunk]:
    pick = rng.choice
    prompts = ["x", [1, 2, 3], ["a", "b c d"], "long " * 60, "long " * 400, [299], [[5], [6, 7]]]
    return sampling_fields(rng) | {
        "prompt": lambda: pick(prompts),
        "max_tokens": lambda: pick([0, 1, 2, 20, 80, 10**9]),
        "logprobs": lambda: pick([0, 1, 20]),
        "logprob_token_ids": lambda: pick([[70], [70, 71], list(range(20))]),
        "echo": lambda: rng.random() < 0.7,
        "best_of": lambda: pick([1, 2, 4]),
    }


def chat_fields(rng: random.Random) -> dict[str, Thunk]:
    pick = rng.choice
    return sampling_fields(rng) | {
        "max_completion_tokens": lambda: pick([1, 2, 20, 80, 10**9]),
        "logprobs": lambda: True,
        "top_logprobs": lambda: pick([0, 1, 20]),
        "logprob_token_ids": lambda: pick([[70], [70, 71], list(range(20))]),
    }


def random_body(rng: random.Random, *, chat: bool) -> dict[str, Any]:
    """A body that asks for a few of all fields; one in ten has junk in a field."""
    body: dict[str, Any] = {"max_tokens": 5}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "The"}
    fields = chat_fields(rng) if chat else completion_fields(rng)
    share = rng.choice([0.05, 0.15, 0.4])
    for name, value in fields.items():
        if rng.random() < share:
            body[name] = value()
    if rng.random() < 0.1:
        body[rng.choice([*fields])] = rng.choice(JUNK)
    return body

"""The application over the real engine, with tiny random models."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_clients import pages_used_become
from tiny_server import serving
from transformers import AutoModelForCausalLM

from outrider.server.tokenizer import Tokenizer


@pytest.mark.parametrize("k", [0, 3])
def test_greedy_text_is_that_of_generate(
    pair: tuple[Path, Path], tokenizer: Tokenizer, k: int
) -> None:
    prompts = ["The quick brown fox", "naïve café 🙂", "Hello world, hello"]
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=True)])
        output = model.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(output.tolist(), skip_special_tokens=True))

    async def run() -> list[str]:
        async with serving(pair, tokenizer, k=k) as (http, _):
            body = {"prompt": prompts, "temperature": 0, "max_tokens": 20}
            choices = (await http.post("/completions", json=body)).json()["choices"]
            return [choice["text"] for choice in choices]

    assert asyncio.run(run()) == expected


def random_body(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, Callable[[], object]] = {
        "n": lambda: rng.randint(1, 3),
        "max_tokens": lambda: rng.choice([1, 2, 20, 200, 256, 10**9]),
        "temperature": lambda: rng.choice([0, 1e-300, 1e-6, 0.5, 1, 100]),
        "top_p": lambda: rng.choice([0, 1e-300, 0.5, 1]),
        "top_k": lambda: rng.choice([-1, 0, 1, 5, 10**9]),
        "min_p": lambda: rng.choice([0, 0.3, 1]),
        "seed": lambda: rng.choice([0, -1, 2**63 - 1, -(2**63)]),
        "stop": lambda: rng.choice(["e", ["a", " the"], []]),
        "stop_token_ids": lambda: [rng.randrange(300) for _ in range(5)],
        "ignore_eos": lambda: True,
        "presence_penalty": lambda: rng.choice([-2, 0.5, 2]),
        "frequency_penalty": lambda: rng.choice([-2, 0.5, 2]),
        "repetition_penalty": lambda: rng.choice([1e-300, 0.5, 1.2, 1e300]),
        "logit_bias": lambda: {str(rng.randrange(300)): rng.choice([-1e9, 3, 100])},
        "allowed_token_ids": lambda: [rng.randrange(300) for _ in range(40)],
        "bad_words": lambda: rng.choice([["the"], ["Hello world", "e", "🙂"]]),
        "min_tokens": lambda: rng.choice([0, 1, 3, 7]),
        "logprobs": lambda: rng.choice([0, 1, 20]),
        "echo": lambda: rng.random() < 0.5,
        "stream": lambda: rng.random() < 0.5,
        "speculation": lambda: {"num_speculative_tokens": rng.choice([0, 1, 2, 9, 10**6])},
        "prompt": lambda: rng.choice(["x", [1, 2, 3], ["a", "b c d"], "long " * 400, [399]]),
    }
    chosen = {name: value() for name, value in choices.items() if rng.random() < 0.4}
    return {"prompt": "The", "max_tokens": 5} | chosen


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """A chat with the same parameters."""
    chat = body | {"messages": [{"role": "user", "content": str(body["prompt"])}]}
    for name in ("prompt", "echo"):
        chat.pop(name, None)
    if "logprobs" in chat:
        chat |= {"logprobs": True, "top_logprobs": chat["logprobs"]}
    return chat


@pytest.mark.parametrize("proposer", ["draft_model", "ngram"])
def test_no_mixture_of_parameters_breaks_the_engine(
    pair: tuple[Path, Path], tokenizer: Tokenizer, proposer: str
) -> None:
    rng = random.Random(0)

    async def run() -> None:
        async with serving(pair, tokenizer, proposer=proposer, num_pages=60) as (http, engine):
            bodies = [random_body(rng) for _ in range(25)]
            chats = [as_chat(random_body(rng)) for _ in range(10)]
            replies = await asyncio.gather(
                *(http.post("/completions", json=body) for body in bodies),
                *(http.post("/chat/completions", json=body) for body in chats),
            )
            bodies += chats
            for body, reply in zip(bodies, replies, strict=True):
                assert reply.status_code in (200, 400), (body, reply.text)
                if reply.status_code == 200:
                    assert '"error"' not in reply.text, (body, reply.text)
            assert {reply.status_code for reply in replies} == {200, 400}
            await asyncio.wait_for(pages_used_become(engine, 0), 5)

    asyncio.run(run())

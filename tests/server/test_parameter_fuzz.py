"""Random, extreme and impossible parameters over the real engine: a valid answer, or a 400 that
names the field. TEST_EXAMPLES=2000 asks that many.
"""

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_clients import pages_used_become
from random_requests import random_body
from tiny_server import serving

from outrider.server.text.tokenizer import Tokenizer

NUM_REQUESTS = int(os.environ.get("TEST_EXAMPLES", "50"))
AT_ONCE = 25
# What only shows when the tokens come: the request's own edits ban them all.
DEAD_ENDS = ("it left no token", "no token can go on")


def assert_is_an_answer(body: dict[str, Any], reply: httpx.Response) -> None:
    text = reply.text
    if reply.status_code == 500 or (reply.status_code == 200 and '{"error"' in text):
        assert any(words in text for words in DEAD_ENDS), (body, text)
        return
    if reply.status_code == 400:
        param = reply.json()["error"]["param"] or ""
        field = param.split(".")[0].split("[")[0]
        assert field in {*body, "prompt", "messages", "max_tokens"}, (body, text)
        return
    assert reply.status_code == 200, (body, text)
    if body.get("stream"):
        *chunks, done, end = text.split("\n\n")
        assert (done, end) == ("data: [DONE]", ""), (body, text)
        choices = [c for chunk in chunks for c in json.loads(chunk[6:])["choices"]]
    else:
        answer = reply.json()
        choices = answer["choices"]
        used = answer["usage"]
        assert used["prompt_tokens"] + used["completion_tokens"] == used["total_tokens"]
    given = body.get("prompt", "")
    num_prompts = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
    ended = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ended) == list(range(num_prompts * int(body.get("n") or 1))), (body, text)


@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_no_mixture_of_parameters_breaks_the_server(
    pair: tuple[Path, Path], tokenizer: Tokenizer, proposer: str
) -> None:
    rng = random.Random(NUM_REQUESTS)

    async def ask(http: httpx.AsyncClient) -> int:
        chat = rng.random() < 0.3
        body = random_body(rng, chat=chat)
        request = http.post("/chat/completions" if chat else "/completions", json=body)
        if rng.random() < 0.05:  # a client that leaves
            try:
                await asyncio.wait_for(request, rng.random() / 10)
            except TimeoutError:
                return 0
            return 0
        reply = await request
        assert_is_an_answer(body, reply)
        return reply.status_code

    async def run() -> None:
        async with serving(
            pair, tokenizer, eos_token_ids=(0,), proposer=proposer, num_pages=60
        ) as (http, engine):
            statuses: list[int] = []
            while len(statuses) < NUM_REQUESTS:
                statuses += await asyncio.gather(*(ask(http) for _ in range(AT_ONCE)))
                await asyncio.wait_for(pages_used_become(engine, 0), 10)
                assert engine.state == "ready"  # it checks its pages and seats when it is idle
            assert statuses.count(200) > NUM_REQUESTS / 5
            assert statuses.count(400) > NUM_REQUESTS / 10

    asyncio.run(run())

"""Ends inside a speculative step: what a step brought behind them leaves no trace."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_clients import pages_used_become
from tiny_server import serving

from outrider.server.text.tokenizer import INCOMPLETE, Tokenizer

Post = Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
K = 6
NUM_TOKENS = 24
PROMPTS = ["The quick brown fox", "naïve café 🙂 and more"]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 40, "seed": 5, "speculation": {"verification": "match"}},
]


def ask(
    pair: tuple[Path, Path],
    tokenizer: Tokenizer,
    questions: Callable[[Post], Coroutine[Any, Any, Any]],
    **settings: Any,
) -> Any:
    """What the questions find out from an engine with the target as its own draft."""

    async def run() -> Any:
        async with serving((pair[0], pair[0]), tokenizer, **settings) as (http, engine):

            async def post(body: dict[str, Any]) -> dict[str, Any]:
                reply: httpx.Response = await http.post("/completions", json=body)
                assert reply.status_code == 200, reply.text
                answer: dict[str, Any] = reply.json()
                await asyncio.wait_for(pages_used_become(engine, 0), 60)  # of others, too
                return {"usage": answer["usage"], **answer["choices"][0]}

            found = await questions(post)
            stats = engine.stats
            assert engine.state == "ready"  # it checks its pages and seats whenever it is idle
            if stats.drafted_per_position:
                assert sum(stats.accepted_per_position) > 0
            return found

    return asyncio.run(run())


def body(tokenizer: Tokenizer, prompt: str, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": tokenizer.encode(prompt, add_special_tokens=True),
        "max_tokens": NUM_TOKENS,
        "logprobs": 2,
        "return_token_ids": True,
    } | fields


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what may round otherwise, or depends on who came before."""
    logprobs = {name: answer["logprobs"][name] for name in ("tokens", "text_offset")}
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert len(answer["logprobs"]["token_logprobs"]) == usage["completion_tokens"]
    return answer | {"logprobs": logprobs, "usage": usage}


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "match"])
def test_a_stop_string_ends_a_speculative_answer_where_it_ends_a_plain_one(
    pair: tuple[Path, Path], tokenizer: Tokenizer, way: dict[str, Any]
) -> None:
    async def stopped(post: Post) -> list[dict[str, Any]]:
        answers = []
        for prompt in PROMPTS:
            whole = await post(body(tokenizer, prompt, **way))
            text = whole["text"]
            stops = [
                text[start : start + length]
                for start in range(0, len(text) - 2, 7)
                for length in (1, 3)
            ]
            bodies = [body(tokenizer, prompt, **way, stop=stop) for stop in stops]
            answers += [whole, *await asyncio.gather(*map(post, bodies))]
        return [comparable(answer) for answer in answers]

    speculative = ask(pair, tokenizer, stopped, k=K, max_num_batched_tokens=512)
    assert speculative == ask(pair, tokenizer, stopped, k=0)
    ends = {answer["usage"]["completion_tokens"] for answer in speculative}
    assert len(ends) > K  # at every place of a step
    for answer in speculative:
        assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
        assert len(answer["logprobs"]["tokens"]) == len(answer["token_ids"])


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "match"])
def test_a_continued_answer_is_the_one_that_was_stopped(
    pair: tuple[Path, Path], tokenizer: Tokenizer, way: dict[str, Any]
) -> None:
    async def continued(post: Post) -> None:
        first = body(tokenizer, PROMPTS[0], **way)
        whole = await post(first)
        stops: list[tuple[int, dict[str, Any]]] = []
        for end in range(1, NUM_TOKENS - 1, 2):
            # A stop id ends the sequence in the engine, a stop string in the server.
            stop_id = whole["token_ids"][end]
            stop_text = tokenizer.token_text(stop_id)
            if INCOMPLETE not in stop_text:
                stops += [(end, {"stop_token_ids": [stop_id]}), (end, {"stop": stop_text})]
        assert len(stops) > K
        cuts = await asyncio.gather(*(post(first | stop) for _, stop in stops))
        bodies = []
        for (end, _), cut in zip(stops, cuts, strict=True):
            num_kept = len(cut["token_ids"])
            assert cut["token_ids"] == whole["token_ids"][:num_kept]
            assert num_kept <= end + 1
            given = first["prompt"] + cut["token_ids"]
            bodies.append(first | {"prompt": given, "max_tokens": NUM_TOKENS - num_kept})
        for cut, rest in zip(cuts, await asyncio.gather(*map(post, bodies)), strict=True):
            num_kept = len(cut["token_ids"])
            # Also where draws are random: they are keyed by seed and position.
            assert rest["token_ids"] == whole["token_ids"][num_kept:]
            assert rest["logprobs"]["token_logprobs"] == pytest.approx(
                whole["logprobs"]["token_logprobs"][num_kept:], abs=1e-4
            )

    ask(pair, tokenizer, continued, k=K, max_num_batched_tokens=512)


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "match"])
def test_eos_ends_a_speculative_answer_where_it_ends_a_plain_one(
    pair: tuple[Path, Path], tokenizer: Tokenizer, way: dict[str, Any]
) -> None:
    async def whole(post: Post) -> list[int]:
        ids: list[int] = (await post(body(tokenizer, PROMPTS[0], **way)))["token_ids"]
        return ids

    ids = ask(pair, tokenizer, whole, k=0)

    async def ended(post: Post) -> list[dict[str, Any]]:
        shown = {"include_stop_str_in_output": True}
        ignored = {"ignore_eos": True}
        bodies = [body(tokenizer, PROMPTS[0], **way, **fields) for fields in ({}, shown, ignored)]
        return [comparable(answer) for answer in await asyncio.gather(*map(post, bodies))]

    for eos in ids[2:9:3]:
        speculative = ask(pair, tokenizer, ended, k=K, eos_token_ids=(eos,))
        assert speculative == ask(pair, tokenizer, ended, k=0, eos_token_ids=(eos,))
        hidden, shown, ignored = speculative
        cut = ids[: ids.index(eos) + 1]
        assert hidden["token_ids"] == shown["token_ids"] == cut
        assert hidden["text"] == tokenizer.decode(cut[:-1], skip_special_tokens=True)
        assert shown["text"] == tokenizer.decode(cut, skip_special_tokens=True)
        assert (hidden["finish_reason"], hidden["stop_reason"]) == ("stop", None)
        assert ignored["token_ids"] == ids

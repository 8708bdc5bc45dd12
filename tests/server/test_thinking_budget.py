"""Thinking ends after as many tokens as the request allows, over HTTP and with a real engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted_client
from asgi import Reply, post
from served import Served
from tiny_models import save_tiny_model
from tiny_server import serving
from tokenizers_for_tests import byte_level_wrapper, tokenizer_of

from outrider.server.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
BEGUN = {"chat_template_kwargs": {"mood": "<think>\n"}}  # the prompt opens the thought
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}},
    "required": ["a"],
    "additionalProperties": False,
}
Pair = tuple[Path, Path]


def with_markers(*markers: str) -> Tokenizer:
    wrapper = byte_level_wrapper()
    wrapper.add_tokens(list(markers))
    return tokenizer_of(wrapper)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return with_markers(OPEN, CLOSE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Pair:
    size = tokenizer.backend.get_vocab_size()
    target, draft = (
        save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=size, num_hidden_layers=n)
        for n in (2, 1)
    )
    return target, draft


def ask(
    pair: Pair,
    tokenizer: Tokenizer,
    *bodies: dict[str, Any],
    path: str = "/chat/completions",
    **settings: Any,
) -> list[Any]:
    """The answers to these requests, which run together."""

    async def send(http: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        if not body.get("stream"):
            return reply.json()
        lines = (line.removeprefix("data: ") for line in reply.text.splitlines())
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def run() -> list[Any]:
        server = {"reasoning_content": True}
        async with serving(pair, tokenizer, server=server, **settings) as (http, engine):
            answers = await asyncio.gather(*(send(http, body) for body in bodies))
            if settings.get("k"):
                assert sum(engine.stats.accepted_per_position) > 0
            return answers

    return asyncio.run(run())


def chat(**fields: Any) -> dict[str, Any]:
    asked = {"messages": HI, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    return asked | BEGUN | fields


def ids_of(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("k", [0, 3])
def test_thinking_ends_when_its_tokens_are_spent(pair: Pair, tokenizer: Tokenizer, k: int) -> None:
    budgets = (0, 1, 2, 7, 24, 10**18)
    free, *bounded = ask(
        pair, tokenizer, chat(), *(chat(thinking_token_budget=n) for n in budgets), k=k
    )
    close, line = tokenizer.id_of(CLOSE), tokenizer.encode("\n", add_special_tokens=False)
    assert len(line) == 1  # of the template's, which is the first token of the thought
    assert close not in ids_of(free)
    for budget, answer in zip(budgets, bounded, strict=True):
        ids, spent = ids_of(answer), max(0, min(budget - 1, 24))
        assert ids[:spent] == ids_of(free)[:spent]
        assert ids[spent : spent + 1] == [close] * (spent < 24)
        message, usage = answer["choices"][0]["message"], answer["usage"]
        said = tokenizer.decode(ids[:spent], skip_special_tokens=True)
        assert (message.get("reasoning_content") or "").strip() == said.strip()
        assert len(ids) == usage["completion_tokens"] == 24
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert counted == min(24, spent + 1)  # with the marker
        assert bool(message["content"]) == (spent < 23)


def test_drafts_change_no_token(pair: Pair, tokenizer: Tokenizer) -> None:
    bodies = [
        chat(thinking_token_budget=budget, seed=seed, temperature=temperature, n=2)
        for budget in (0, 2, 5)
        for seed, temperature in ((1, 1.0), (2, 0.7), (3, 0))
    ]
    plain, drafted = (ask(pair, tokenizer, *bodies, k=k) for k in (0, 3))
    for one, other in zip(plain, drafted, strict=True):
        assert len(one["choices"]) == 2
        assert [c["token_ids"] for c in one["choices"]] == [
            c["token_ids"] for c in other["choices"]
        ]
        assert all(tokenizer.id_of(CLOSE) in c["token_ids"][:5] for c in one["choices"])


def test_the_budget_is_of_all_thoughts_together(pair: Pair, tokenizer: Tokenizer) -> None:
    open_id, close = tokenizer.id_of(OPEN), tokenizer.id_of(CLOSE)
    begins = {"chat_template_kwargs": {}, "logit_bias": {str(open_id): 100}, "max_tokens": 9}
    for k in (0, 3):
        (answer,) = ask(pair, tokenizer, chat(thinking_token_budget=3, **begins), k=k)
        thought = [open_id] * 3
        assert ids_of(answer) == [open_id, *thought, close, open_id, close, open_id, close]


def test_a_thought_that_is_continued_has_spent_its_tokens(pair: Pair, tokenizer: Tokenizer) -> None:
    prefilled = f"{OPEN}one two three"
    spent = len(tokenizer.encode("one two three", add_special_tokens=False))
    turns = [*HI, {"role": "assistant", "content": prefilled}]
    went_on = {"messages": turns, "continue_final_message": True, "chat_template_kwargs": {}}
    close = tokenizer.id_of(CLOSE)
    budgets = (0, spent, spent + 3)
    bodies = [chat(thinking_token_budget=n, **went_on) for n in budgets]
    firsts = [ids_of(answer).index(close) for answer in ask(pair, tokenizer, *bodies, k=3)]
    assert firsts == [0, 0, 3]


def test_without_a_thought_nothing_is_forced(pair: Pair, tokenizer: Tokenizer) -> None:
    closed = {"chat_template_kwargs": {"mood": f"{OPEN}\n\n{CLOSE}\n\n"}}
    question = {"role": "user", "content": f"What is {OPEN}?"}
    for prompt in (closed, {"messages": [question], "chat_template_kwargs": {}}):
        bodies = [chat(**prompt), chat(**prompt, thinking_token_budget=0)]
        free, bounded = map(ids_of, ask(pair, tokenizer, *bodies))
        assert free == bounded


def test_a_stream_has_the_same_thought_and_content(pair: Pair, tokenizer: Tokenizer) -> None:
    body = chat(thinking_token_budget=5)
    stopping = ids_of(ask(pair, tokenizer, body)[0])[10]
    body |= {"stop": tokenizer.decode([stopping], skip_special_tokens=True)}
    whole, stream = ask(pair, tokenizer, body, body | {"stream": True}, k=3)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "stop"
    deltas = [each["choices"][0]["delta"] for each in stream if each["choices"]]
    for field in ("reasoning_content", "content"):
        said = "".join(delta.get(field) or "" for delta in deltas)
        assert said == (choice["message"].get(field) or "")
    assert choice["message"]["reasoning_content"]


@pytest.mark.parametrize("k", [0, 3])
def test_a_schema_binds_the_answer_after_a_thought_that_was_ended(
    pair: Pair, tokenizer: Tokenizer, k: int
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    bodies = [
        chat(thinking_token_budget=n, seed=n, temperature=1, max_tokens=80, response_format=schema)
        for n in range(1, 8)
    ]
    for answer in ask(pair, tokenizer, *bodies, eos_token_ids=(0,), k=k):
        (choice,) = answer["choices"]
        # The grammar lets no thought end within a character: then it ends right behind that.
        assert choice["token_ids"].index(tokenizer.id_of(CLOSE)) < 12
        assert json.loads(choice["message"]["content"])["a"] in ("x", "yes")


def test_a_completion_is_bounded_by_what_its_prompt_leaves_open(
    pair: Pair, tokenizer: Tokenizer
) -> None:
    prompts = [f"{OPEN}a b", f"{OPEN}a{CLOSE}b", "a b"]
    asked = {"prompt": prompts, "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    bodies = [asked, asked | {"thinking_token_budget": 4}]
    free, bounded = (
        [choice["token_ids"] for choice in answer["choices"]]
        for answer in ask(pair, tokenizer, *bodies, path="/completions", k=3)
    )
    spent = len(tokenizer.encode("a b", add_special_tokens=False))
    assert bounded[0].index(tokenizer.id_of(CLOSE)) == 4 - spent
    assert bounded[0][: 4 - spent] == free[0][: 4 - spent]
    assert bounded[1:] == free[1:]


def test_messages_and_responses_are_bounded_too(pair: Pair, tokenizer: Tokenizer) -> None:
    common = {"temperature": 0, **BEGUN}
    thinking = {"type": "enabled", "budget_tokens": 5}
    message = {"messages": HI, "max_tokens": 20, "thinking": thinking, **common}
    (said,) = ask(pair, tokenizer, message, path="/messages", k=3)
    assert [block["type"] for block in said["content"]] == ["thinking", "text"]
    response = {"input": "Hi", "max_output_tokens": 20, "thinking_token_budget": 5, **common}
    (answer,) = ask(pair, tokenizer, response, path="/responses", k=3)
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 5  # a line, a marker
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][0]["content"][0]["text"] == said["content"][0]["thinking"]


# ---- what cannot be done


def scripted(tokenizer: Tokenizer, **settings: Any) -> Served:
    play = scripted_client.saying(tokenizer, "Hello", finish="stop")
    return Served(play, tokenizer, **{"reasoning_content": True} | settings)


def send(served: Served, path: str = "/v1/chat/completions", **fields: Any) -> Reply:
    return post(served.app, {"messages": HI, "max_tokens": 9} | fields, path=path)


@pytest.mark.parametrize(
    ("markers", "settings", "reason"),
    [
        ((OPEN, CLOSE), {"reasoning_content": None}, "shows no thinking"),
        ((OPEN, CLOSE), {"reasoning_content": False}, "shows no thinking"),
        ((), {}, "does not think between two tokens"),
        ((OPEN,), {}, "does not think between two tokens"),
        ((OPEN, CLOSE), {"tool_call_format": "harmony"}, "does not think between two tokens"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    markers: tuple[str, ...], settings: dict[str, Any], reason: str
) -> None:
    served = scripted(with_markers(*markers), **settings)
    given = {"chat/completions": {"messages": HI}, "completions": {"prompt": "Hi"}} | {
        "responses": {"input": "Hi"},
        "messages": {"messages": HI, "max_tokens": 9},
    }
    for path, body in given.items():
        reply = post(served.app, body | {"thinking_token_budget": 5}, path=f"/v1/{path}")
        assert reason in reply.error["message"]
        if path == "messages":  # whose errors have no such field
            continue
        assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")
    assert not served.client.submitted
    # Anthropic's clients cannot leave it out.
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert send(served, "/v1/messages", thinking=thinking).status == 200
    assert served.client.submitted[-1][0].params.thinking is None


def test_a_number_that_is_no_budget_is_refused(tokenizer: Tokenizer) -> None:
    served = scripted(tokenizer)
    for given in (-1, 0.5, "many", [5]):
        reply = send(served, thinking_token_budget=given)
        assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget"), given
        reply = send(served, "/v1/messages", thinking={"type": "enabled", "budget_tokens": given})
        assert reply.status == 400, given
    assert send(served, thinking_token_budget=None).status == 200
    assert served.client.submitted[-1][0].params.thinking is None


def test_a_marker_may_go_on_in_text() -> None:
    """Gemma's, whose text is no part of the thought."""
    wrapper = byte_level_wrapper()
    wrapper.add_tokens(["<|channel>", "<channel|>"])
    wrapper.chat_template += "{# <channel|> #}"
    tokenizer = tokenizer_of(wrapper)
    served = scripted(tokenizer, reasoning_content=None)
    assert send(served, thinking_token_budget=7).status == 200
    budget = served.client.submitted[-1][0].params.thinking
    assert budget is not None
    assert budget.num_opening == len(tokenizer.encode("thought\n", add_special_tokens=False))
    assert (budget.num_tokens, budget.begun) == (7, False)
    assert (budget.open_token_id, budget.close_token_id) == tuple(
        map(tokenizer.id_of, ("<|channel>", "<channel|>"))
    )

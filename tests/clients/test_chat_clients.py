"""Libraries that applications talk through: the same words as without them, their own errors."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from running_server import RunningServer

pytestmark = [pytest.mark.model, pytest.mark.slow]

Look = Callable[[str, str], dict[str, Any]]


@pytest.mark.clients
def test_openai_python_asks_several_at_once(
    server: RunningServer, expected: dict[str, Any], model: str
) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str | None:
        async with client.chat.completions.stream(
            model=model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_completion_tokens=12,
        ) as stream:
            return (await stream.get_final_completion()).choices[0].message.content

    async def run() -> list[str | None]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for _ in range(4)))

    assert asyncio.run(run()) == [expected["chat"]] * 4


@pytest.mark.clients("node")
def test_openai_node(seen_by: Look, expected: dict[str, Any], model: str) -> None:
    seen = seen_by("node", "use_openai.cjs")
    assert seen == expected | {
        "helper": expected["chat"],
        "models": [model],
        "too_long": {
            "class": "BadRequestError",
            "status": 400,
            "code": "context_length_exceeded",
        },
        "wrong_model": {"class": "NotFoundError", "status": 404, "code": "model_not_found"},
    }


@pytest.mark.clients("litellm")
def test_litellm(seen_by: Look, expected: dict[str, Any]) -> None:
    assert seen_by("litellm", "use_litellm.py") == expected | {
        "too_long": "ContextWindowExceededError",
        "wrong_model": "NotFoundError",
        "wrong_value": "BadRequestError",
    }


@pytest.mark.clients("langchain-openai")
def test_langchain_openai(seen_by: Look, expected: dict[str, Any]) -> None:
    assert seen_by("langchain-openai", "use_langchain.py") == expected | {
        "reason": "stop",
        "several": [expected["chat"]] * 4,
    }

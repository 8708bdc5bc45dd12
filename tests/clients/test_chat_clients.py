"""Libraries that applications talk through: the same words as without them, their own errors."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

Look = Callable[[str, str], dict[str, Any]]


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


@pytest.mark.clients("ollama")
def test_ollama(seen_by: Look, expected: dict[str, Any], model: str) -> None:
    assert seen_by("ollama", "use_ollama.py") == expected | {
        "models": [model],
        "fields": ["city"],
        "wrong_model": 404,
    }


@pytest.mark.clients("llama-index-llms-openai-like")
def test_llamaindex(seen_by: Look, expected: dict[str, Any]) -> None:
    seen = seen_by("llama-index-llms-openai-like", "use_llamaindex.py")
    assert seen == {name: value for name, value in expected.items() if name != "streamed_tokens"}

"""The application over a scripted engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_client import Play, steps
from served import Served
from tiny_models import save_tiny_model
from tokenizers_for_tests import byte_fallback_tokenizer, byte_level_tokenizer

from outrider.engine.api import NewRequest, RequestOutput
from outrider.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return byte_fallback_tokenizer()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> tuple[Path, Path]:
    size = tokenizer.backend.get_vocab_size()
    target, draft = (
        save_tiny_model(tmp_path_factory.mktemp("model"), seed=seed, vocab_size=size)
        for seed in (0, 1)
    )
    return target, draft


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Callable[..., Served]:
    """`serve(play, **server_settings)`; without a script, every answer is " Hello world"."""

    def hello(request: NewRequest) -> list[RequestOutput]:
        ids = tokenizer.encode(" Hello world", add_special_tokens=False)
        return steps(request, ids[: request.params.max_tokens])

    def make(play: Play = hello, **settings: Any) -> Served:
        return Served(play, tokenizer, **settings)

    return make

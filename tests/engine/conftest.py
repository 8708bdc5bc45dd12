"""Tiny models, made once a session."""

from pathlib import Path

import pytest
from tiny_models import Tiny, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made: dict[str, Path] = {}

    def get(architecture: str = "llama", **settings: object) -> Path:
        key = f"{architecture}-{sorted(settings.items())}"
        if key not in made:
            path = tmp_path_factory.mktemp(architecture)
            made[key] = save_tiny_model(path, architecture, **settings)  # type: ignore[arg-type]
        return made[key]

    return get


@pytest.fixture(scope="session")
def target(tiny_model: Tiny) -> Path:
    return tiny_model("llama", seed=0)


@pytest.fixture(scope="session")
def draft(tiny_model: Tiny) -> Path:
    """Shares most of the target's weights, so that some drafts are accepted and some are not."""
    return tiny_model("llama", seed=0, num_hidden_layers=1)

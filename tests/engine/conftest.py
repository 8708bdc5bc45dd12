"""Tiny models, made once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(architecture, seed=…)` -> model directory."""
    made: dict[str, Path] = {}

    def get(architecture: str = "llama", **settings: object) -> Path:
        key = f"{architecture}-{sorted(settings.items())}"
        if key not in made:
            path = tmp_path_factory.mktemp(architecture)
            made[key] = save_tiny_model(path, architecture, **settings)  # type: ignore[arg-type]
        return made[key]

    return get

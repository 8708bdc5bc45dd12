"""Tiny models, made once a session."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Tiny, save_tiny_model

from outrider.engine.models import compiled_decoder
from outrider.kernels.model.rope import rotary_table


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


@pytest.fixture
def short_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers begin with few positions, and what reads behind their tables gets NaN."""

    def bounded(positions: torch.Tensor, *rope: Any) -> list[torch.Tensor]:
        tables = rotary_table(positions, *rope)
        return [
            torch.cat((table, torch.full_like(table, torch.nan)))[: len(table)] for table in tables
        ]

    monkeypatch.setattr(compiled_decoder, "_FEWEST_POSITIONS", 8)
    monkeypatch.setattr(compiled_decoder, "rotary_table", bounded)


@pytest.fixture(scope="session")
def target(tiny_model: Tiny) -> Path:
    return tiny_model("llama", seed=0)


@pytest.fixture(scope="session")
def draft(tiny_model: Tiny) -> Path:
    """Shares most of the target's weights, so that some drafts are accepted and some are not."""
    return tiny_model("llama", seed=0, num_hidden_layers=1)

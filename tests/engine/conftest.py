"""Tiny models, made once a session."""

from pathlib import Path
from typing import Any

import pytest
import torch
from proven_once import prove_once
from tiny_models import DEVICE, Quick, Tiny, save_tiny_model

from outrider.engine.models import compiled_decoder
from outrider.kernels.cpu.layers import compiled
from outrider.kernels.model.rope import rotary_table

prove_once()


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
def quick_model(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Quick:
    """Models of four tokens for many samples: on a CPU of compiled layers, where there are any."""
    made: dict[tuple[int, int], Path] = {}

    def get(seed: int, num_layers: int = 1) -> Path:
        if DEVICE.type == "cuda" or compiled() is None:
            sizes = {"vocab_size": 4, "num_hidden_layers": num_layers}
            return tiny_model("llama", seed=seed, scale=0.15, **sizes)
        from tiny_gguf import save_quick_llama  # `make gpu` has no gguf

        if (seed, num_layers) not in made:
            folder = tmp_path_factory.mktemp("quick")
            made[seed, num_layers] = save_quick_llama(folder, seed, 4, num_layers)
        return made[seed, num_layers]

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

"""Engines of two ranks, whose processes all end."""

import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
from forked_ranks import forked
from tiny_models import DEVICE
from two_ranks import follower_of, shared

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine


@pytest.fixture
def start(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[EngineConfig], Engine]]:
    """Start an engine of two ranks; afterwards, all processes have ended.

    They leave no file while they run: so there is none however they end, even killed.
    """
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    engines = []
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def started(config: EngineConfig) -> Engine:
        if DEVICE.type == "cuda":
            engines.append(Engine(shared(config)))
            ranks = engines[-1].worker.followers
            assert ranks is not None
            # Else this would test NCCL alone.
            by_nccl = os.environ.get("NCCL_P2P_DISABLE") == "1"
            assert (ranks.group._peers is None) == by_nccl
        else:
            with forked():
                engines.append(Engine(shared(config)))
        return engines[-1]

    yield started
    left = list(temporary.iterdir())
    for engine in engines:
        engine.worker.close()
        with pytest.raises(ProcessLookupError):
            os.kill(follower_of(engine), 0)
    assert left == []

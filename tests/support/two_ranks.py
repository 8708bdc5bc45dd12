"""Engines of two ranks."""

from dataclasses import replace

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine


def shared(config: EngineConfig, size: int = 2) -> EngineConfig:
    target = replace(config.target, tensor_parallel=size)
    return replace(config, target=target, num_threads=1)


def with_shared_draft(config: EngineConfig, size: int = 2) -> EngineConfig:
    assert config.draft is not None
    return replace(config, draft=replace(config.draft, tensor_parallel=size))


def follower_of(engine: Engine) -> int:
    ranks = engine.worker.followers
    assert ranks is not None
    (pid,) = ranks.pids
    return pid

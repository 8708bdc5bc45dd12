"""Engines of two ranks."""

from dataclasses import replace

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine


def shared(config: EngineConfig, size: int = 2) -> EngineConfig:
    target = replace(config.target, tensor_parallel=size)
    return replace(config, target=target, num_threads=1)


def follower_of(engine: Engine) -> int:
    ranks = engine.worker.followers
    assert ranks is not None
    (pid,) = ranks.pids
    return pid

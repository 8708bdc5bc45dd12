"""Time each of the five calls of an engine's step, from outside."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outrider.engine.loop import Engine

PARTS = ("schedule", "propose", "score", "verify", "commit")


@contextmanager
def timed_parts(engine: Engine, *, synchronize: bool = False) -> Iterator[dict[str, list[float]]]:
    """Seconds of every call by part, and of whole steps, one list entry a step.

    With `synchronize`, each call waits for the GPU, so that its own work is what is counted.
    """
    spent: dict[str, list[float]] = defaultdict(list)
    owners: list[tuple[Any, str]] = [
        (engine.scheduler, "schedule"),
        (engine.proposer, "propose"),
        (engine.target, "score"),
        (engine.verifier, "verify"),
        (engine.scheduler, "commit"),
        (engine, "step"),
    ]

    def wrap(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start_s = time.perf_counter()
            result = call(*args)
            if synchronize:
                torch.cuda.synchronize()
            spent[name].append(time.perf_counter() - start_s)
            return result

        setattr(owner, name, timed)

    for owner, name in owners:
        wrap(owner, name)
    try:
        yield spent
    finally:
        for owner, name in owners:
            delattr(owner, name)  # the class's own method shows again

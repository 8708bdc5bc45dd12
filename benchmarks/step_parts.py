"""Time each of the five parts of an engine's step, from outside."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outrider.engine.engine import Engine

PARTS = ("schedule", "propose", "score", "verify", "commit")

Call = Callable[..., Any]


@contextmanager
def wrapped(calls: list[tuple[Any, str, str]], wrap: Callable[[Call, str], Call]) -> Iterator[None]:
    """Wrap methods of an engine's parts: each of an owner, the method's name and its part."""
    for owner, name, part in calls:
        setattr(owner, name, wrap(getattr(owner, name), part))
    try:
        yield
    finally:
        for owner, name, _ in calls:
            delattr(owner, name)  # the class's own method shows again


@contextmanager
def timed_parts(engine: Engine) -> Iterator[dict[str, list[float]]]:
    """Seconds by part, and of whole steps, one list entry a step."""
    spent: dict[str, list[float]] = defaultdict(list)
    in_step = dict.fromkeys(PARTS, 0.0)
    calls: list[tuple[Any, str, str]] = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.worker.proposer, "propose", "propose"),
        (engine.worker.scorer, "score", "score"),
        (engine.worker.verifier, "verify", "verify"),
        (engine.worker.verifier, "read", "verify"),
        (engine.committer, "commit", "commit"),
        (engine, "step", "step"),
    ]

    def wrap(call: Call, part: str) -> Call:
        def timed(*args: Any) -> Any:
            start_s = time.perf_counter()
            result = call(*args)
            elapsed_s = time.perf_counter() - start_s
            if part == "step":
                spent[part].append(elapsed_s)
                for name_of in PARTS:
                    spent[name_of].append(in_step[name_of])
                    in_step[name_of] = 0.0
            else:
                in_step[part] += elapsed_s
            return result

        return timed

    with wrapped(calls, wrap):
        yield spent

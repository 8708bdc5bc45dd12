"""Replicas that run in processes of their own, which import them by name."""

import signal
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any


def talk(rank: int, said: "Queue[tuple[Any, ...]]", name: str) -> None:
    if rank == 0:
        for i in range(3):
            said.put((name, i, 3))
        said.put(("done", "a draft"))


def one_fails(rank: int, said: "Queue[tuple[Any, ...]]", how: str) -> None:
    if rank == 1 and how == "raises":
        raise ArithmeticError("out of luck")
    if rank == 1:
        raise SystemExit(3)
    time.sleep(600)  # as in a sum over all replicas


def save_in_the_end(rank: int, said: "Queue[tuple[Any, ...]]", path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if rank == 0:
            said.put(("it works", 0, 1))
        time.sleep(600)
    except KeyboardInterrupt:
        path.write_text("saved")

"""Work that may keep the event loop for long."""

import asyncio
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Fewer are read sooner than handed to a thread, which takes 0.1 ms, and under load waits for
# Python's lock.
MANY_CHARS = 2048


async def off_loop(num_chars: int, work: Callable[[*Ts], T], *args: *Ts) -> T:
    """What `work` returns, which reads about so many characters; in a thread if they are many."""
    if num_chars < MANY_CHARS:
        return work(*args)
    return await asyncio.to_thread(work, *args)

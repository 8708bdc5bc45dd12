"""Work that may keep the event loop for long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Fewer are read sooner than handed to a thread, which takes 0.1 ms, and under load waits for
# Python's lock.
MANY_CHARS = 2048
# More are read one after the other: threads that compute keep each other, and the event loop,
# waiting for Python's lock, and shorter texts waiting for a thread.
LARGE_CHARS = 2**16
_LARGE = ThreadPoolExecutor(1, "large")
# JSON, and what is made of it: as many bytes of any kind take a millisecond at most, most of them
# 0.1 ms. A thread waits longer for Python's lock while the event loop is busy.
MANY_BYTES = 2**14


async def off_loop(num_chars: int, work: Callable[[*Ts], T], *args: *Ts) -> T:
    """What `work` returns, which reads about so many characters; in a thread if they are many, and
    in turn if they are very many."""
    if num_chars < MANY_CHARS:
        return work(*args)
    if num_chars < LARGE_CHARS:
        return await asyncio.to_thread(work, *args)
    return await asyncio.get_running_loop().run_in_executor(_LARGE, work, *args)


async def json_off_loop(num_bytes: int, work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Likewise, of work that reads about so many bytes of JSON."""
    if num_bytes < MANY_BYTES:
        return work(*args)
    return await off_loop(num_bytes, work, *args)

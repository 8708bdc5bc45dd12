"""Work that may keep the event loop for long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Characters of text. Fewer are read sooner than handed to a thread, which takes 0.1 ms, and under
# load waits for Python's lock.
MANY_CHARS = 2048
# Bytes of JSON, and of what is made of it: as many of any kind take a millisecond at most, most of
# them 0.1 ms. A thread waits longer for Python's lock while the event loop is busy.
MANY_BYTES = 2**14
# More are read one after the other: threads that compute keep each other, and the event loop,
# waiting for Python's lock, and shorter texts waiting for a thread.
_LARGE_LENGTH = 2**16
_LARGE = ThreadPoolExecutor(1, "large")


async def off_loop(
    length: int, work: Callable[[*Ts], T], *args: *Ts, threshold: int = MANY_BYTES
) -> T:
    """What `work` returns, which reads about so many bytes of JSON, or characters; in a thread if
    they reach the threshold, and in turn if they are very many.
    """
    if length < threshold:
        return work(*args)
    if length < _LARGE_LENGTH:
        return await asyncio.to_thread(work, *args)
    return await asyncio.get_running_loop().run_in_executor(_LARGE, work, *args)

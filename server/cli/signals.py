"""Signals that end a command."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def be_interrupted_by(sig: signal.Signals) -> None:
    """Raise KeyboardInterrupt on this signal, as Python does on Ctrl-C: before there is a task.

    Without a handler SIGTERM would not even end a container's first process.
    """
    signal.signal(sig, signal.default_int_handler)


def run_until_ended(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, which SIGTERM ends as Ctrl-C does; raises KeyboardInterrupt then."""

    async def main() -> T:
        be_cancelled_by(signal.SIGTERM)
        return await work

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)


def be_cancelled_by(sig: signal.Signals) -> None:
    """Cancel the running task on this signal, as asyncio does on Ctrl-C.

    An exception from the signal's handler could come anywhere: between opening a socket and the
    line that sees to its end, say, and then the process would wait for that socket for ever.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    signal.signal(sig, cancel)

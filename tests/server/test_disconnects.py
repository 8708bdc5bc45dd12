"""Work that stops when its client leaves, as opposed to work that others cancel."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import ClientDisconnect

from outrider.server.base.streaming import while_connected

Receive = Callable[[], Awaitable[dict[str, str]]]


async def leaves() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def stays() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError


def end_of(receive: Receive, *, is_cancelled: bool) -> tuple[BaseException | None, int, list[str]]:
    """What endless work ends with, how many ask its task to end then, and what the work saw."""
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # it may wait while it cleans up
            seen.append("cleaned up")

    async def run() -> tuple[BaseException | None, int]:
        task = asyncio.current_task()
        assert task is not None
        if is_cancelled:  # in the turn in which the client is heard of
            asyncio.get_running_loop().call_soon(task.cancel)
        try:
            await while_connected(receive, work())
        except (ClientDisconnect, asyncio.CancelledError) as error:
            return error, task.cancelling()
        return None, task.cancelling()

    error, num_asking = asyncio.run(run())
    return error, num_asking, seen


def test_work_ends_when_its_client_leaves() -> None:
    error, num_asking, seen = end_of(leaves, is_cancelled=False)
    assert (type(error), num_asking, seen) == (ClientDisconnect, 0, ["cleaned up"])


@pytest.mark.parametrize("receive", [stays, leaves])
def test_who_cancels_the_request_is_not_taken_for_its_client(receive: Receive) -> None:
    """Nor if the client leaves at that moment."""
    error, num_asking, seen = end_of(receive, is_cancelled=True)
    assert (type(error), num_asking, seen) == (asyncio.CancelledError, 1, ["cleaned up"])


def test_work_that_is_done_leaves_nobody_waiting_for_the_client() -> None:
    async def run() -> tuple[int, set[asyncio.Task[None]]]:
        async def work() -> int:
            await asyncio.sleep(0)
            return 7

        answer = await while_connected(stays, work())
        await asyncio.sleep(0)
        return answer, asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(run()) == (7, set())

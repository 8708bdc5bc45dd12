"""A socket between two processes: nothing waits, nothing is lost, and order stays."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from outrider.engine.processes.connection import Connection, ZmqContext

pytestmark = pytest.mark.anyio

DECODER = msgspec.msgpack.Decoder(int)
TIMEOUT_S = 10


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


async def until(heard: list[int], count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while len(heard) < count:
            await asyncio.sleep(0.001)


async def test_sending_waits_for_no_peer(context: ZmqContext, tmp_path: Path) -> None:
    endpoint, heard = f"ipc://{tmp_path}/socket", list[int]()
    sender = Connection(context, endpoint, DECODER, print, binds=True)
    for i in range(3):
        sender.send(i)
    await asyncio.sleep(0.01)
    receiver = Connection(context, endpoint, DECODER, heard.append)
    await until(heard, 3)
    assert heard == [0, 1, 2]
    receiver.close()
    sender.send(3)  # to nobody
    await asyncio.sleep(0.01)
    sender.close()
    sender.close()


async def test_both_ends_talk_at_the_same_time(context: ZmqContext, tmp_path: Path) -> None:
    endpoint, numbers = f"ipc://{tmp_path}/socket", list(range(500))
    heard: list[list[int]] = [[], []]
    ends = [
        Connection(context, endpoint, DECODER, heard[0].append, binds=True),
        Connection(context, endpoint, DECODER, heard[1].append),
    ]
    for i in numbers:
        for end in ends:
            end.send(i)
        await asyncio.sleep(0)
    await asyncio.gather(*(until(each, len(numbers)) for each in heard))
    assert heard == [numbers, numbers]
    for end in ends:
        end.close()


async def test_a_message_is_on_its_way_before_the_loop_turns(
    context: ZmqContext, tmp_path: Path
) -> None:
    endpoint, heard = f"ipc://{tmp_path}/socket", list[int]()
    sender = Connection(context, endpoint, DECODER, heard.append)
    with context.socket(zmq.DEALER) as peer:
        peer.bind(endpoint)
        sender.send(1)
        while not peer.poll(1):
            await asyncio.sleep(0.001)
        sender.send(2)
        messages = []
        while len(messages) < 2 and peer.poll(TIMEOUT_S * 1000):  # keeps the loop from its turn
            messages.append(msgspec.msgpack.decode(peer.recv()))
    sender.close()
    assert messages == [1, 2]


async def test_who_hears_may_answer_and_close(context: ZmqContext, tmp_path: Path) -> None:
    endpoint, heard = f"ipc://{tmp_path}/socket", list[int]()

    def answer(number: int) -> None:
        heard.append(number)
        asked.send(-number)
        if number == 3:
            asked.close()
        if number == 2:
            raise ValueError("a bad message must not affect the others")

    asked = Connection(context, endpoint, DECODER, answer, binds=True)
    answers: list[int] = []
    asker = Connection(context, endpoint, DECODER, answers.append)
    for i in range(1, 6):
        asker.send(i)
    await until(answers, 3)
    await asyncio.sleep(0.01)
    assert answers[:3] == [-1, -2, -3]
    assert heard == [1, 2, 3, 4, 5]  # closing handles what has arrived
    asked.send(0)
    asker.close()

"""Several clients of one engine: each gets what is its own, and none pays for another."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from engine_clients import (
    TIMEOUT_S,
    ScriptedProcessEngine,
    collect,
    pages_used_become,
    scripted_config,
    state_becomes,
)
from engine_clients import scripted_request as request

from outrider.engine.processes.connection import ZmqContext
from outrider.engine.processes.messages import (
    Abort,
    Admitted,
    FromEngine,
    Hello,
    Refused,
    StepOutputs,
    Submit,
    ToEngine,
)

pytestmark = pytest.mark.anyio

Owner = ScriptedProcessEngine


class Sharer:
    """A client of few words, which reads what the engine says only when it is asked to."""

    def __init__(self, context: ZmqContext, endpoint: str, receive_hwm: int = 0) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = receive_hwm
        self.socket.connect(endpoint)
        self.say(Hello())

    def say(self, message: ToEngine) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    async def until(self, is_last: Callable[[FromEngine], bool]) -> list[FromEngine]:
        heard: list[FromEngine] = []
        async with asyncio.timeout(TIMEOUT_S):
            while not heard or not is_last(heard[-1]):
                while not self.socket.poll(0):
                    await asyncio.sleep(0.001)
                heard.append(msgspec.msgpack.decode(self.socket.recv(), type=FromEngine))
        return heard


def tokens(heard: list[FromEngine]) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    for message in heard:
        for output in message.outputs if isinstance(message, StepOutputs) else []:
            got.setdefault(output.request_id, []).extend(output.token_ids)
    return got


def ends(request_id: str) -> Callable[[FromEngine], bool]:
    return lambda message: (
        isinstance(message, StepOutputs)
        and any(
            output.request_id == request_id and output.finish_reason for output in message.outputs
        )
    )


@pytest.fixture
async def owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ScriptedProcessEngine]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = ScriptedProcessEngine(scripted_config(), is_shared=True)
    await owner.start()
    yield owner
    await owner.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def share(owner: Owner) -> Callable[..., Sharer]:
    endpoint = owner.status.endpoint
    assert endpoint is not None
    return lambda **options: Sharer(owner._context, endpoint, **options)


async def test_each_hears_of_its_own_sequences_alone(
    owner: Owner, share: Callable[..., Sharer]
) -> None:
    sharers = {name: share() for name in "ab"}
    for name, sharer in sharers.items():
        sharer.say(Submit(0, [request(name, max_tokens=20)]))  # ids are each one's own
    mine = asyncio.create_task(collect(await owner.generate([request("c", max_tokens=20)])))
    for name, sharer in sharers.items():
        heard = await sharer.until(ends(name))
        assert tokens(heard) == {name: list(range(20))}
        assert [m for m in heard if isinstance(m, Admitted)] == [Admitted(0)]
    assert await mine == {"c": list(range(20))}


async def test_an_answer_names_its_submission(share: Callable[..., Sharer]) -> None:
    sharer = share()
    sharer.say(Submit(5, [request("a", script="invalid")]))
    sharer.say(Submit(3, [request("b")]))
    sharer.say(Submit(4, [request(f"c{i}") for i in range(9)]))
    heard = await sharer.until(lambda m: isinstance(m, Refused) and m.submission_id == 4)
    answers = [m for m in heard if isinstance(m, Admitted | Refused)]
    assert answers == [
        Refused(5, "invalid", "an invalid prompt"),
        Admitted(3),
        Refused(4, "queue_full", "the queue is full"),
    ]


async def test_who_goes_takes_only_its_own_sequences_along(
    owner: Owner, share: Callable[..., Sharer]
) -> None:
    leaver, stayer = share(), share()
    leaver.say(
        Submit(0, [request("lost", max_tokens=10**6), request("lost too", max_tokens=10**6)])
    )
    await leaver.until(lambda message: isinstance(message, StepOutputs) and bool(message.outputs))
    stayer.say(Submit(0, [request("kept", max_tokens=300)]))
    leaver.socket.close()
    heard = await stayer.until(ends("kept"))
    assert tokens(heard) == {"kept": list(range(300))}
    await pages_used_become(owner, 0)  # the owner hears of it, though nobody works any more
    assert owner.state == "ready"


async def test_nobody_ends_the_sequences_of_another(share: Callable[..., Sharer]) -> None:
    one, other = share(), share()
    one.say(Submit(0, [request("a", max_tokens=50)]))
    await one.until(lambda message: isinstance(message, Admitted))
    other.say(Submit(0, [request("b", max_tokens=10**6)]))
    other.say(Abort(["a", "b", "b", "unknown"]))
    other.say(Submit(1, [request("c")]))
    assert "c" in tokens(await other.until(ends("c")))
    assert tokens(await one.until(ends("a")))["a"][-1] == 49


async def test_an_engine_that_hangs_with_the_work_of_others_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = ScriptedProcessEngine(scripted_config(), step_timeout_s=0.3, is_shared=True)
    await owner.start()
    endpoint = owner.status.endpoint
    assert endpoint is not None
    sharer = Sharer(owner._context, endpoint)  # kept: a socket that is collected sends nothing
    sharer.say(Submit(0, [request("a", script="hang")]))
    await state_becomes(owner, "restarting")
    assert "no step ended within 0.3 s" in (owner.status_reason or "")
    assert owner.status.endpoint is None
    await state_becomes(owner, "ready")
    assert owner.status.endpoint not in (None, endpoint)
    await owner.stop()


async def test_one_that_does_not_read_holds_nobody_up(
    owner: Owner, share: Callable[..., Sharer]
) -> None:
    deaf = share(receive_hwm=1)
    deaf.say(Submit(0, [request(f"deaf{i}", max_tokens=10**6) for i in range(3)]))
    await pages_used_become(owner, 3)
    assert await collect(await owner.generate([request("a", max_tokens=2000)]))
    assert owner.stats.pages_used >= 3
    deaf.socket.close()
    await pages_used_become(owner, 0)

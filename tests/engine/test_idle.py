"""What the engine process does when it runs out of work: answers first, accounts later."""

from typing import Any

import zmq
from engine_clients import scripted_config, scripted_request
from scripted_engine import ScriptedEngine

from outrider.engine.processes import process
from outrider.engine.processes.messages import FromEngine, Shutdown, StepOutputs, Submit, ToEngine

Heard = list[tuple[bytes, ToEngine]]


class Engine(ScriptedEngine):
    """Notes when it accounts for its pages."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(scripted_config(), lambda *progress: None)
        self._events = events

    def check_integrity(self) -> None:
        self._events.append("accounted")


class Channel:
    """Notes what is sent. Each entry of `later` comes when the engine is without work."""

    def __init__(self, events: list[str], later: list[Heard], *, is_quiet: bool) -> None:
        self._events, self._later, self._is_quiet = events, later, is_quiet

    def is_quiet(self, wait_s: float) -> bool:
        self._events.append("waited")
        return self._is_quiet

    def receive(self, wait_s: float | None) -> Heard:
        return self._later.pop(0) if wait_s is None else []

    def send(self, client: bytes, message: FromEngine) -> bool:
        if isinstance(message, StepOutputs):
            self._events += [f"ended {o.request_id}" for o in message.outputs if o.finish_reason]
        return True


def events_of(*, is_quiet: bool) -> list[str]:
    """Of two requests, one after the other."""
    events: list[str] = []
    first, second = ((b"", Submit(i, [scripted_request(name)])) for i, name in enumerate("ab"))
    channel: Any = Channel(events, [[second], [(b"", Shutdown())]], is_quiet=is_quiet)
    engine: Any = Engine(events)
    process.serve(engine, channel, [first])
    return events


def test_the_last_answer_is_sent_before_pages_are_accounted_for() -> None:
    events = events_of(is_quiet=True)
    assert events == ["ended a", "waited", "accounted", "ended b", "waited", "accounted"]


def test_no_request_waits_until_pages_are_accounted_for() -> None:
    assert events_of(is_quiet=False) == ["ended a", "waited", "ended b", "waited"]


def test_a_message_ends_the_wait() -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as socket,
        context.socket(zmq.DEALER) as client,
    ):
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        channel = process.Channel(socket)
        assert channel.is_quiet(0.01)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"")
        assert not channel.is_quiet(60.0)

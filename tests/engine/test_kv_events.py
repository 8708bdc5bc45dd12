"""What routers hear of the prefix cache, and in what form."""

import random
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from engines import engine_config
from tiny_models import save_tiny_model

from outrider.engine.api import NewRequest, ReportProgress, SamplingParams
from outrider.engine.config import CacheConfig, ConfigError, EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.memory.announcements import PageRemoved, PageStored
from outrider.engine.memory.device_memory import DeviceMemory
from outrider.engine.memory.sequence import SequenceMemory
from outrider.engine.memory.spec import PagedSpec
from outrider.engine.memory.states import KeptStates
from outrider.engine.processes.kv_events import Publisher, to_messages
from outrider.engine.processes.messages import (
    FromEngine,
    Hello,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
)
from outrider.engine.processes.process import load_engine, run

PAGE = 4


def request(token_ids: list[int], cache_salt: str = "", max_tokens: int = 1) -> NewRequest:
    return NewRequest(
        request_id="r",
        prompt_token_ids=token_ids,
        params=SamplingParams(max_tokens=max_tokens),
        cache_salt=cache_salt,
    )


def compute(memory: DeviceMemory, token_ids: list[int], cache_salt: str = "") -> SequenceMemory:
    one = SequenceMemory(token_ids, cache_salt)
    memory.attach_prefix(one, len(token_ids) - 1, 0)
    assert memory.allocate(one, len(token_ids))
    memory.launch(one, 0, None)
    return one


def test_each_page_is_published_once_behind_the_page_before_it() -> None:
    memory = DeviceMemory([PagedSpec(1)], [10], PAGE, keeps_events=True)
    one = compute(memory, list(range(9)))
    assert memory.events == [
        PageStored(one.page_hashes[0], None, [0, 1, 2, 3]),
        PageStored(one.page_hashes[1], one.page_hashes[0], [4, 5, 6, 7]),
    ]
    other = compute(memory, [*range(4), 9, 9, 9, 9, 9])
    assert memory.events[2:] == [PageStored(other.page_hashes[1], one.page_hashes[0], [9] * 4)]


def test_what_is_published_is_what_can_be_found() -> None:
    memory = DeviceMemory([PagedSpec(1)], [5], PAGE, keeps_events=True)
    announced: set[bytes] = set()
    for start in range(0, 90, 9):
        memory.release(compute(memory, list(range(start, start + 9))))
        for event in memory.events:
            if isinstance(event, PageStored):
                assert event.page_hash not in announced
                announced.add(event.page_hash)
            else:
                announced.remove(event.page_hash)
        memory.events.clear()
        assert announced == set(memory._groups[0]._page_of_hash)
    assert announced


def test_where_layers_keep_states_pages_are_published_in_front_of_them_alone() -> None:
    """And withdrawn with the last state that needs them; a salted prompt's are not published."""
    states = KeptStates(range(100, 103), PAGE, 3 * PAGE)
    memory = DeviceMemory([PagedSpec(1)], [40], PAGE, states=states, keeps_events=True)
    rng, announced, pages_in_front = random.Random(0), set(), {}
    texts = [[rng.randrange(9) for _ in range(60)] for _ in range(3)]
    num_announced = []
    for _ in range(60):
        text = [*rng.choice(texts)[: rng.randrange(60)], *rng.choice(texts)[: rng.randrange(1, 20)]]
        one = SequenceMemory(text, rng.choice(["", "", "", "salt"]))
        memory.attach_prefix(one, len(text) - 1, 0)
        assert memory.allocate(one, len(text))
        while (left := len(text) - one.num_computed_tokens) > 0:
            end = one.num_computed_tokens + one.rows_up_to_an_edge(left)
            memory.launch(one, end - len(text), None)
        memory.release(one)
        for i, page_hash in enumerate(one.page_hashes if not one.cache_salt else []):
            pages_in_front[page_hash] = one.page_hashes[: i + 1]
        for event in memory.events:
            if isinstance(event, PageStored):
                assert event.page_hash not in announced
                assert event.parent_hash is None or event.parent_hash in announced
                announced.add(event.page_hash)
            else:
                announced.remove(event.page_hash)
        memory.events.clear()
        needed = {h for kept in states._place_of_hash for h in pages_in_front.get(kept, ())}
        assert announced == {h for h in needed if memory._groups[0].find(h) is not None}
        num_announced.append(len(announced))
    assert max(num_announced) > min(num_announced[5:])


def test_nothing_is_published_of_a_salted_prefix_or_unless_asked() -> None:
    memory = DeviceMemory([PagedSpec(1)], [5], PAGE, keeps_events=True)
    for start in range(0, 90, 9):
        memory.release(compute(memory, list(range(start, start + 9)), "salt"))
    assert memory.events == []
    silent = DeviceMemory([PagedSpec(1)], [10], PAGE)
    compute(silent, list(range(9)))
    assert silent.events == []


def test_messages_have_the_form_of_vllm() -> None:
    a, b, c, d = (bytes([i]) * 16 for i in (1, 2, 3, 0xFF))
    events = [
        PageRemoved(d),
        PageRemoved(c),
        PageStored(a, None, [1, 2]),
        PageStored(b, a, [3, 4]),
        PageStored(d, a, [5, 6]),
    ]
    packed = msgspec.msgpack.encode(to_messages(events, 2))
    short_a, short_b, short_c = (int.from_bytes(x[:8], "big") for x in (a, b, c))
    assert msgspec.msgpack.decode(packed) == [
        ["BlockRemoved", [2**64 - 1, short_c], "GPU"],
        ["BlockStored", [short_a, short_b], None, [1, 2, 3, 4], 2, None, "GPU", None],
        ["BlockStored", [2**64 - 1], short_a, [5, 6], 2, None, "GPU", None],
    ]


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[tuple[str, "zmq.Socket[bytes]"]]:
    """An endpoint, and a socket that hears all that is published there."""
    endpoint = f"ipc://{tmp_path}/events"
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe("kv@")
        socket.rcvtimeo = 10_000
        socket.linger = 0
        socket.connect(endpoint)
        yield endpoint, socket


def heard(socket: "zmq.Socket[bytes]") -> tuple[int, list[list[object]]]:
    topic, number, payload = socket.recv_multipart()
    assert topic == b"kv@me"
    assert len(number) == 8
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert ts > 1e9
    assert rank == 0
    return int.from_bytes(number, "big"), events


def test_a_batch_is_three_frames_with_a_number_that_counts(
    subscriber: tuple[str, "zmq.Socket[bytes]"],
) -> None:
    endpoint, socket = subscriber
    with closing(Publisher(endpoint, "kv@me", PAGE)) as publisher:
        while not socket.poll(10):  # until it has subscribed
            publisher.clear()
        first, events = heard(socket)
        assert events == [["AllBlocksCleared"]]
        while socket.poll(100):
            first, _ = heard(socket)
        publisher.publish([])
        publisher.publish([PageRemoved(b"\0" * 16)])
        assert heard(socket) == (first + 1, [["BlockRemoved", [0], "GPU"]])


@pytest.mark.parametrize("endpoint", ["ipc:///not-there/socket", "tcp://*:x", "tcp://host"])
def test_an_endpoint_that_cannot_be_used_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_events_endpoint is '{re.escape(endpoint)}': .*; na"):
        Publisher(endpoint, "", PAGE)


class Client:
    """Submits a sequence once the engine is there, and leaves when it has ended."""

    def __init__(self, new: NewRequest) -> None:
        self._inbox: list[ToEngine] = [Hello()]
        self._new = new

    def receive(self, wait_s: float | None) -> list[tuple[bytes, ToEngine]]:
        inbox, self._inbox = self._inbox, []
        return [(b"me", message) for message in inbox]

    def is_quiet(self, wait_s: float) -> bool:
        return not self._inbox

    def send(self, client: bytes, message: FromEngine) -> bool:
        assert client == b"me"
        if isinstance(message, Ready):
            self._inbox.append(Submit(7, [self._new]))
        if any(output.finish_reason for output in getattr(message, "outputs", [])):
            self._inbox.append(Shutdown())
        return True


def test_an_engine_publishes_what_it_caches(
    subscriber: tuple[str, "zmq.Socket[bytes]"], tmp_path: Path
) -> None:
    endpoint, socket = subscriber
    cache = CacheConfig(
        page_size_tokens=PAGE, num_pages=32, kv_events_endpoint=endpoint, kv_events_topic="kv@me"
    )
    target = save_tiny_model(tmp_path / "target")
    config = replace(engine_config(target), cache=cache)
    prompt = list(range(10))

    def load(config: EngineConfig, report: ReportProgress) -> Engine:
        time.sleep(0.5)  # as models take longer to load than subscribers to find the socket
        return load_engine(config, report)

    assert run(load, config, Client(request(prompt, max_tokens=4)))
    announced = []
    while socket.poll(500):
        announced += heard(socket)[1]
    assert announced[0] == ["AllBlocksCleared"]
    stored = [event for event in announced if event[0] == "BlockStored"]
    token_ids = [i for event in stored for i in event[3]]
    assert token_ids[:8] == prompt[:8]
    assert len(token_ids) == 12

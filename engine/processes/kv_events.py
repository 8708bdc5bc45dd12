"""Reports to routers which prefixes are cached here, in the messages that vLLM publishes.

A message on the ZeroMQ PUB socket has three frames: the topic, a sequence number (8 bytes, big
endian, from 0) and an `EventBatch` in msgpack, with structs as arrays that start with their name.
A gap in the numbers means a lost message. The messages contain token ids of prompts, so only the
router should be able to reach the endpoint.
"""

import time
from collections.abc import Iterable
from itertools import count

import msgspec
import zmq

from ..config import ConfigError
from ..memory.announcements import PageEvent, PageRemoved, PageStored

_MEDIUM = "GPU"  # vLLM's name for the memory that the engine computes in, also on a CPU


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Pages that are now cached, in the order of their tokens."""

    block_hashes: list[int]  # 64 bits each
    parent_block_hash: int | None
    token_ids: list[int]  # [len(block_hashes) * block_size]
    block_size: int
    lora_id: None = None
    medium: str | None = _MEDIUM
    lora_name: None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None = _MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """Nothing is cached: the engine has just started."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float  # seconds since the epoch
    events: list[KVEvent]
    data_parallel_rank: int | None = 0


class Publisher:
    """The PUB socket; messages are dropped if no subscriber is there or none is fast enough.

    As in vLLM, an endpoint that has a `*` or `::`, or is ipc, is bound; any other is connected to.
    Create it before the models are loaded: subscribers of an engine that died then have time to
    reconnect before `AllBlocksCleared` is sent.
    """

    def __init__(self, endpoint: str, topic: str, page_size: int) -> None:
        """Raises ConfigError if the endpoint cannot be used."""
        self._page_size = page_size
        self._topic = topic.encode()
        self._sequence = count()
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 1000)
        is_bound = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
        try:
            (self._socket.bind if is_bound else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"cache.kv_events_endpoint is {endpoint!r}: {error.strerror}; name another"
            ) from None

    def close(self) -> None:
        self._socket.close()

    def clear(self) -> None:
        self._send([AllBlocksCleared()])

    def publish(self, events: Iterable[PageEvent]) -> None:
        """Send a batch, unless there are no events."""
        if batch := to_messages(events, self._page_size):
            self._send(batch)

    def _send(self, events: list[KVEvent]) -> None:
        number = next(self._sequence).to_bytes(8, "big")
        payload = self._encoder.encode(EventBatch(time.time(), events))
        self._socket.send_multipart([self._topic, number, payload])


def to_messages(events: Iterable[PageEvent], page_size: int) -> list[KVEvent]:
    """Messages for these events; consecutive pages share one."""
    messages: list[KVEvent] = []
    for event in events:
        last = messages[-1] if messages else None
        page_hash = _short(event.page_hash)
        match event:
            case PageRemoved():
                if isinstance(last, BlockRemoved):
                    last.block_hashes.append(page_hash)
                else:
                    messages.append(BlockRemoved([page_hash]))
            case PageStored(parent_hash=parent):
                parent_hash = None if parent is None else _short(parent)
                if isinstance(last, BlockStored) and last.block_hashes[-1] == parent_hash:
                    last.block_hashes.append(page_hash)
                    last.token_ids += event.token_ids
                else:
                    messages.append(
                        BlockStored([page_hash], parent_hash, list(event.token_ids), page_size)
                    )
    return messages


def _short(page_hash: bytes) -> int:
    """The first 64 bits, as routers expect."""
    return int.from_bytes(page_hash[:8], "big")

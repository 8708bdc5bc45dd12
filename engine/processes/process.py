"""The engine process: brings an engine up, then takes messages and steps until told to leave.

Started by `ProcessEngine` as
`python -P -m outrider.engine.processes.process ENDPOINT LOG_LEVEL LOG_FORMAT`,
with the `EngineConfig` as one line of JSON on its stdin.
"""

import contextlib
import ctypes
import gc
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from ..api import (
    InvalidRequestError,
    NewRequest,
    QueueFullError,
    ReportProgress,
    RequestOutput,
)
from ..config import CacheConfig, EngineConfig
from .child_process import leave_with_parent
from .log_lines import JSONFormatter, LineFormatter
from .messages import (
    Abort,
    Admitted,
    Failed,
    FromEngine,
    Loading,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Submit,
    ToEngine,
)

if TYPE_CHECKING:
    from ..engine import Engine
    from ..scheduling.kv_events import Publisher

TEXT_LINE = "%(asctime)s engine[%(process)d] %(levelname)s %(name)s: %(message)s"

log = logging.getLogger("outrider.engine.processes.process")


class Channel(Protocol):
    """The engine's end of the line to its client."""

    def receive(self, wait_s: float | None) -> list[ToEngine]:
        """Take every message that arrives within so long, in order; None: wait for the first."""
        ...

    def send(self, message: FromEngine) -> None:
        """Hand a message over without waiting for the client to read it."""
        ...


def load_engine(config: EngineConfig, progress: "ReportProgress") -> "Engine":
    progress("loading the libraries", 0, 1)
    from ..engine import Engine  # takes seconds: torch, transformers

    return Engine(config, progress)


def _load_warm_engine(config: EngineConfig, progress: "ReportProgress") -> "Engine":
    engine = load_engine(config, progress)
    engine.warm_up_grammars()
    _give_memory_back()
    return engine


def _give_memory_back() -> None:
    """Return what loading freed to the system; by itself the C library keeps 100 MB of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def run(
    make_engine: "Callable[[ReportProgress], Engine]", channel: Channel, cache: CacheConfig
) -> bool:
    """Load and serve; whatever goes wrong is logged and sent as Failed. True: left as asked."""
    try:
        with _publisher(cache) as publisher:
            engine = make_engine(
                lambda stage, done, total: channel.send(Loading(stage, done, total))
            )
            channel.send(Ready(engine.info))
            if publisher is not None:
                publisher.clear()
            serve(engine, channel, publisher)
    except Exception as error:
        log.exception("the engine stops")
        channel.send(Failed(f"{type(error).__name__}: {error}"))
        return False
    return True


def _publisher(cache: CacheConfig) -> "contextlib.AbstractContextManager[Publisher | None]":
    if cache.kv_events_endpoint is None:
        return contextlib.nullcontext()
    from ..scheduling.kv_events import Publisher

    return Publisher(cache.kv_events_endpoint, cache.kv_events_topic, cache.page_size_tokens)


def serve(engine: "Engine", channel: Channel, publisher: "Publisher | None" = None) -> None:
    """Alternate between messages and steps; without work, wait. Returns on Shutdown."""
    while True:
        for message in channel.receive(engine.spare_s() if engine.has_work() else None):
            match message:
                case Submit(requests):
                    _submit(engine, channel, requests)
                case Abort(request_ids):
                    engine.abort(request_ids)
                case Shutdown():
                    return
        outputs = engine.step() if engine.has_work() else []
        if publisher is not None:
            publisher.publish(engine.take_page_events())
        if not engine.has_work():
            engine.check_integrity()
        channel.send(Outputs(outputs, engine.stats()))


def _submit(engine: "Engine", channel: Channel, requests: list[NewRequest]) -> None:
    ids = [request.request_id for request in requests]
    try:
        engine.submit(requests)
    except QueueFullError as error:
        channel.send(Refused(ids, "queue_full", str(error)))
    except InvalidRequestError as error:
        channel.send(Refused(ids, "invalid", str(error)))
    except Exception as error:  # ours, not the client's: these requests fail, the others go on
        log.exception("could not take requests %s", ids)
        engine.abort(ids)
        reason = f"{type(error).__name__}: {error}"
        channel.send(Admitted(ids))
        channel.send(
            Outputs(
                [
                    RequestOutput(request_id=i, token_ids=[], finish_reason="error", error=reason)
                    for i in ids
                ],
                engine.stats(),
            )
        )
    else:
        channel.send(Admitted(ids))


class _SocketChannel:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, wait_s: float | None) -> list[ToEngine]:
        if wait_s is None:
            self._socket.poll()
        end_s = time.perf_counter() + (wait_s or 0.0)
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                left_ms = int(1000 * (end_s - time.perf_counter()))
                if left_ms <= 0 or not self._socket.poll(left_ms):
                    return messages
                continue
            try:
                messages.append(self._decoder.decode(data))
            except Exception as error:  # whatever the bytes did to the decoder, they are no message
                log.warning("ignored %d bytes that are no message: %s", len(data), error)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))


def main(
    make_engine: "Callable[[EngineConfig, ReportProgress], Engine]" = _load_warm_engine,
) -> int:
    endpoint, log_level, log_format = sys.argv[1:]
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else LineFormatter(TEXT_LINE))
    logging.basicConfig(level=int(log_level), handlers=[handler])
    logging.captureWarnings(True)
    (line,) = leave_with_parent(num_lines=1)
    config = msgspec.json.decode(line, type=EngineConfig)

    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)  # a slow client must not hold the batch up
        socket.connect(endpoint)
        channel = _SocketChannel(socket)
        served = run(lambda progress: make_engine(config, progress), channel, config.cache)
    return 0 if served else 1


if __name__ == "__main__":
    sys.exit(main())

"""The engine process: starts an engine, then alternates between messages and steps.

It answers every process that sends Hello. The first one is the process that started it.

Started by `ProcessEngine` as
`python -P -m outrider.engine.processes.process LOG_LEVEL LOG_FORMAT ENDPOINT`,
with the `EngineConfig` as one line of JSON on its stdin.
"""

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from ..api import InvalidRequestError, NewRequest, QueueFullError, ReportProgress, RequestOutput
from ..config import CacheConfig, ConfigError, EngineConfig
from ..lifeline import leave, leave_with_parent
from .heap import give_memory_back
from .log_lines import JSONFormatter, LineFormatter
from .messages import (
    Abort,
    Admitted,
    Failed,
    FromEngine,
    Hello,
    Loading,
    Ready,
    Refused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)

if TYPE_CHECKING:
    from ..engine import Engine
    from .kv_events import Publisher

TEXT_LINE = "%(asctime)s engine[%(process)d] %(levelname)s %(name)s: %(message)s"

_MOST_MESSAGES = 1000  # taken between two steps
_QUIET_S = 1.0  # without work or a message, before pages and slots are accounted for

log = logging.getLogger("outrider.engine.processes.process")


def load_libraries() -> "type[Engine]":
    """Import the engine, which takes seconds: torch, transformers."""
    import torch

    # Where Triton has no use, torch and transformers must not load it: it takes 70 MB.
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # as if it were missing
    from ..engine import Engine

    return Engine


def load_engine(config: EngineConfig, report: ReportProgress) -> "Engine":
    """Load an engine, and start what its first request would otherwise have to wait for."""
    engine = load_libraries()(config, report)
    if config.device != "cpu":  # on a CPU they depend on what else runs
        from ..learning import learn_costs  # as late as the libraries

        learn_costs(engine, report)
    engine.warm_up_grammars()
    gc.collect()
    gc.freeze()  # what is loaded stays: to search all of it for garbage would hold up a step
    give_memory_back()
    return engine


class Channel:
    """The engine's end of the connections to its clients, each of which has a name."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, wait_s: float | None) -> list[tuple[bytes, ToEngine]]:
        """The messages that arrive within `wait_s`, in order, each with the name of its sender.

        None: wait for the first message. If there are very many, the last are left for the next
        call, so that a client that sends too fast does not keep the engine from its steps.
        """
        end_s = time.perf_counter() + (wait_s or 0.0)
        messages: list[tuple[bytes, ToEngine]] = []
        while len(messages) < _MOST_MESSAGES:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                is_idle = wait_s is None and not messages
                left_ms = max(0, int(1000 * (end_s - time.perf_counter())))
                if not self._socket.poll(None if is_idle else left_ms):
                    return messages
                continue
            data = b"".join(frames)
            try:
                messages.append((client, self._decoder.decode(data)))
            except Exception as error:  # bytes that cannot be decoded, for any reason
                log.warning("ignored %d bytes that are no message: %s", len(data), error)
        return messages

    def is_quiet(self, wait_s: float) -> bool:
        """Whether no message arrives within `wait_s`; waits until one does."""
        return not self._socket.poll(int(1000 * wait_s))

    def send(self, client: bytes, message: FromEngine) -> bool:
        """Send without waiting for the client to read; returns False if the client has gone."""
        try:
            self._socket.send_multipart([client, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


MakeEngine = Callable[[EngineConfig, ReportProgress], "Engine"]


def run(make_engine: MakeEngine, config: EngineConfig, channel: Channel) -> bool:
    """Load and serve; errors are logged and sent as Failed. Returns True after a Shutdown."""
    messages = channel.receive(None)
    owner, _ = messages[0]

    def report(stage: str, done: int, total: int) -> None:
        channel.send(owner, Loading(stage, done, total))

    try:
        with _publisher(config.cache) as publisher:
            engine = make_engine(config, report)
            channel.send(owner, Ready(engine.info))
            if publisher is not None:
                publisher.clear()
            serve(engine, channel, messages, publisher)
    except ConfigError as error:
        channel.send(owner, Failed(str(error)))
        return False
    except Exception as error:
        log.exception("the engine stops")
        channel.send(owner, Failed(f"{type(error).__name__}: {error}"))
        return False
    return True


def _publisher(cache: CacheConfig) -> "contextlib.AbstractContextManager[Publisher | None]":
    if cache.kv_events_endpoint is None:
        return contextlib.nullcontext()
    from .kv_events import Publisher

    return contextlib.closing(
        Publisher(cache.kv_events_endpoint, cache.kv_events_topic, cache.page_size_tokens)
    )


def serve(
    engine: "Engine",
    channel: Channel,
    messages: list[tuple[bytes, ToEngine]],
    publisher: "Publisher | None" = None,
) -> None:
    """Alternate between messages and steps; without work, wait. Returns on Shutdown."""
    clients = Clients(engine, channel)
    while True:
        for client, message in messages:
            if isinstance(message, Shutdown):
                return
            clients.hear(client, message)
        outputs = engine.step() if engine.has_work() else []
        if publisher is not None:
            publisher.publish(engine.take_page_events())
        clients.report(outputs)
        if engine.has_work():
            messages = channel.receive(engine.spare_s())
            continue
        # With many pages this takes milliseconds, for which no answer and no next request waits.
        if channel.is_quiet(_QUIET_S):
            engine.check_integrity()
        messages = channel.receive(None)


class Clients:
    """The processes that use an engine; each gets what becomes of its own sequences, and the state
    of the engine.

    If sending to a client fails, it has gone, and its sequences are aborted.
    """

    def __init__(self, engine: "Engine", channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._clients: set[bytes] = set()
        self._client_of: dict[str, bytes] = {}  # by request id, for unfinished sequences

    def hear(self, client: bytes, message: Hello | Submit | Abort) -> None:
        self._clients.add(client)
        match message:
            case Submit(submission_id, requests):
                self._submit(client, submission_id, requests)
            case Abort(request_ids):
                self._abort([i for i in request_ids if self._client_of.get(i) == client])

    def report(self, outputs: list[RequestOutput]) -> None:
        """Send each client its outputs of a step."""
        own: dict[bytes, list[RequestOutput]] = {client: [] for client in self._clients}
        for output in outputs:
            own[self._client_of[output.request_id]].append(output)
            if output.finish_reason is not None:
                del self._client_of[output.request_id]
        stats = self._engine.stats()
        if gone := [c for c in own if not self._channel.send(c, StepOutputs(own[c], stats))]:
            self._clients.difference_update(gone)
            self._abort([i for i, client in self._client_of.items() if client in gone])
            self.report([])  # to the others: there is room now

    def _submit(self, client: bytes, submission_id: int, requests: list[NewRequest]) -> None:
        ids = [request.request_id for request in requests]
        failed: list[RequestOutput] = []
        try:
            self._engine.submit(requests)
        except QueueFullError as error:
            self._channel.send(client, Refused(submission_id, "queue_full", str(error)))
            return
        except InvalidRequestError as error:
            self._channel.send(client, Refused(submission_id, "invalid", str(error)))
            return
        except Exception as error:  # our own error: these requests fail, the others go on
            log.exception("could not take requests %s", ids)
            self._engine.abort(ids)
            reason = f"{type(error).__name__}: {error}"
            failed = [
                RequestOutput(request_id=i, token_ids=[], finish_reason="error", error=reason)
                for i in ids
            ]
        self._client_of |= dict.fromkeys(ids, client)
        self._channel.send(client, Admitted(submission_id))
        if failed:
            self.report(failed)

    def _abort(self, request_ids: list[str]) -> None:
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._client_of.pop(request_id, None)  # an id may be listed twice


def main(make_engine: MakeEngine, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Run the engine process; `meanwhile` is called before its config has come."""
    log_level, log_format, endpoint = sys.argv[1:]
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else LineFormatter(TEXT_LINE))
    logging.basicConfig(level=int(log_level), handlers=[handler])
    logging.captureWarnings(True)
    config = msgspec.json.decode(leave_with_parent(meanwhile), type=EngineConfig)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set_hwm(0)  # a slow client must not delay the others
        socket.router_mandatory = True  # sending to a client that has gone raises
        socket.bind(endpoint)
        return 0 if run(make_engine, config, Channel(socket)) else 1


if __name__ == "__main__":
    leave(main(load_engine, meanwhile=load_libraries))

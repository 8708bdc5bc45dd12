"""One engine for several processes: the one that owns it stands between it and the others."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from ..api import EngineStats, InvalidRequestError, QueueFullError, RequestOutput
from .client import Dispatcher, EngineUnavailableError
from .messages import (
    Abort,
    Admitted,
    FromOwner,
    Hello,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Status,
    Submit,
    ToEngine,
    ToOwner,
    Up,
)

log = logging.getLogger("outrider.engine.processes.relay")


class Sharer:
    """The owner's view of one process that shares its engine: what it asked for, and was told."""

    def __init__(self, engine: Dispatcher, send: Callable[[bytes], None]) -> None:
        self.is_up = False  # the process has said so
        self._engine = engine
        self._send_bytes = send
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToOwner)
        self._submissions: dict[str, _Submission] = {}  # by request id, not finished
        self._outputs: list[RequestOutput] = []  # of the message that is being acted on
        self._told: tuple[Status, EngineStats] | None = None

    def hear(self, data: bytes) -> None:
        """Act on a message of the process."""
        try:
            message = self._decoder.decode(data)
        except Exception:  # whatever the bytes did to the decoder, they are no message
            log.exception("ignored %d bytes that are no message", len(data))
            return
        match message:
            case Up():
                self.is_up = True
            case Hello() if self._told is None:
                self._engine.watchers.append(self._tell)
                self._tell()
            case Submit(requests):
                ids = [request.request_id for request in requests]
                submission = _Submission(self, ids)
                try:
                    self._engine.submit(requests, submission)
                except (InvalidRequestError, EngineUnavailableError) as error:
                    submission.fail(error)
                else:
                    self._submissions |= dict.fromkeys(ids, submission)
            case Abort(request_ids):
                self._drop(request_ids)

    def close(self) -> None:
        """The process has gone: so does what it asked for."""
        if self._told is not None:
            self._told = None
            self._engine.watchers.remove(self._tell)
        self._drop(list(self._submissions))

    def shut_down(self) -> None:
        """Ask the process to finish what it has, and leave."""
        self.send(Shutdown())

    def send(self, message: FromOwner) -> None:
        self._send_bytes(self._encoder.encode(message))

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        if output.finish_reason is not None:
            self.forget([output.request_id])

    def forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._submissions.pop(request_id, None)

    def _drop(self, request_ids: list[str]) -> None:
        dropped = [i for i in request_ids if i in self._submissions]
        for request_id in dropped:
            # One that the engine has not answered yet shall not count as running once it does.
            self._submissions.pop(request_id).unfinished.discard(request_id)
        if dropped:
            self._engine.drop(dropped)

    def _tell(self) -> None:
        """Pass on what the last message brought: tokens, numbers, a new state."""
        engine = self._engine
        status, stats = Status(engine.state, engine.status_reason, engine.info), engine.stats
        told_status, told_stats = self._told or (None, None)
        if self._outputs or stats != told_stats:
            self.send(Outputs(self._outputs, stats))
            self._outputs = []
        if status != told_status:
            self.send(status)
        self._told = status, stats


class _Submission:
    def __init__(self, sharer: Sharer, request_ids: list[str]) -> None:
        self._sharer = sharer
        self._is_admitted = False
        self.request_ids = request_ids
        self.unfinished = set(request_ids)

    def admit(self) -> None:
        self._is_admitted = True
        self._sharer.send(Admitted(self.request_ids))

    def put(self, output: RequestOutput) -> None:
        self._sharer.put(output)

    def fail(self, error: Exception) -> None:
        self._sharer.forget(self.request_ids)
        if not self._is_admitted:  # else the engine's state tells
            match error:
                case QueueFullError():
                    refused = Refused(self.request_ids, "queue_full", str(error))
                case EngineUnavailableError():
                    refused = Refused(self.request_ids, "unavailable", str(error))
                case _:
                    refused = Refused(self.request_ids, "invalid", str(error))
            self._sharer.send(refused)


class SharedEngine(Dispatcher):
    """An engine that another process owns, at the other end of a socket; it is not ours to stop."""

    def __init__(self, endpoint: str, on_shutdown: Callable[[], None]) -> None:
        super().__init__()
        self.has_heard = asyncio.Event()  # how the engine is
        self._endpoint = endpoint
        self._on_shutdown = on_shutdown
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromOwner)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None

    def _launch(self) -> None:
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.connect(self._endpoint)
        self._socket.send(self._encoder.encode(Hello()))
        self._reader = asyncio.create_task(self._read(self._socket), name="reader of the owner")

    def report_up(self) -> None:
        """Tell the owner that this process does its work from here on."""
        if self._socket is not None:
            self._socket.send(self._encoder.encode(Up()))

    async def stop(self) -> None:
        """End what is under way here; the owner frees it once this process has left."""
        self._down("stopped", "the engine was stopped")
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._context.destroy(linger=0)

    def _send(self, message: ToEngine) -> None:
        if self._socket is not None and not self._socket.closed:
            self._socket.send(self._encoder.encode(message))

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            try:
                self._hear(self._decoder.decode(data))
            except Exception:  # one message must not cost the server
                log.exception("could not act on a message of the owner (%d bytes)", len(data))

    def _hear(self, message: FromOwner) -> None:
        match message:
            case Shutdown():
                self._on_shutdown()
            case Status(state, reason, info):
                if state == "ready" and info is not None:
                    self._receive(Ready(info))
                elif state != "starting":
                    # What has not been answered yet, the owner answers.
                    self._lose_running(state, reason or state)
                self.has_heard.set()
            case Admitted() | Refused() | Outputs():
                self._receive(message)

"""Prepares a pair in a process of its own, so that torch and transformers are gone afterwards.

`prepare` starts `python -P -m outrider.server.models.prepare ENDPOINT`, with the settings as one
line of JSON on its stdin.
"""

import asyncio
import logging
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from outrider.engine.api import ReportProgress, ignore_progress
from outrider.engine.config import EngineConfig
from outrider.engine.lifeline import describe_exit, leave_with_parent
from outrider.engine.processes.child_process import ChildProcess
from outrider.engine.processes.messages import Failed, Loading

from ..config.settings import Settings
from ..text.tokenizer import TokenizerData
from .store import ModelError


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything needed to serve a pair, with nothing left to look up."""

    settings: Settings
    engine: EngineConfig
    tokenizer: TokenizerData

    def to_json(self) -> bytes:
        """One line of JSON with secrets: only for our own processes."""
        return msgspec.json.encode(self, enc_hook=lambda settings: msgspec.Raw(settings.to_json()))

    @classmethod
    def from_json(cls, data: bytes) -> "Prepared":
        return msgspec.json.decode(
            data, type=cls, dec_hook=lambda _, settings: Settings.model_validate(settings)
        )


class _Logged(msgspec.Struct, frozen=True, tag=True):
    """A line for the server's log."""

    logger: str
    level: int
    text: str


class _Done(msgspec.Struct, frozen=True, tag=True):
    prepared: bytes


_Sent = Loading | _Logged | _Done | Failed


async def prepare(settings: Settings, report: ReportProgress = ignore_progress) -> Prepared:
    """`prepare_pair` in another process, so that its libraries are not loaded in this one.

    Raises ModelError.
    """
    ended: asyncio.Future[_Done | Failed] = asyncio.get_running_loop().create_future()

    def hear(message: _Sent) -> None:
        match message:
            case Loading(stage, done, total):
                report(stage, done, total)
            case _Logged(logger, level, text):
                logging.getLogger(logger).log(level, "%s", text)
            case _Done() | Failed() as last:
                ended.set_result(last)

    context = zmq.Context()
    child = ChildProcess(
        context,
        (sys.executable, "-P", "-m", "outrider.server.models.prepare"),
        line=settings.to_json(),
        decoder=msgspec.msgpack.Decoder(_Sent),
        hear=hear,
    )
    running = asyncio.create_task(child.run())
    try:
        either: set[asyncio.Future[Any]] = {running, ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            raise ModelError(f"the pair could not be prepared: {describe_exit(await running)}")
    finally:
        running.cancel()  # ends the child, which has sent everything
        await asyncio.wait({running})
        context.destroy(linger=0)
    last = ended.result()
    if isinstance(last, Failed):
        raise ModelError(last.message)
    return Prepared.from_json(last.prepared)


class _Hand(logging.Handler):
    """Sends the log lines of this process to its parent, which formats them."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        super().__init__()
        self._socket = socket

    def emit(self, record: logging.LogRecord) -> None:
        _send(self._socket, _Logged(record.name, record.levelno, self.format(record)))


def _send(socket: "zmq.Socket[bytes]", message: _Sent) -> None:
    socket.send(msgspec.msgpack.encode(message))


def main() -> None:
    (endpoint,) = sys.argv[1:]
    settings = Settings.model_validate_json(leave_with_parent())
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set_hwm(0)
        socket.bind(endpoint)
        hand = _Hand(socket)
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[hand])
        logging.captureWarnings(True)
        logging.getLogger("outrider").setLevel(settings.server.log_level.upper())

        def report(stage: str, done: int, total: int) -> None:
            _send(socket, Loading(stage, done, total))

        report("loading the libraries", 0, 1)
        from .pair import engine_config, prepare_pair, resolve_device

        try:
            resolve_device(settings.target.device)  # reports a missing GPU before any fetching
            pair = prepare_pair(settings, report)
            prepared = Prepared(pair.settings, engine_config(pair), pair.tokenizer)
        except (ModelError, ValueError, OSError) as error:
            _send(socket, Failed(str(error)))
        else:
            _send(socket, _Done(prepared.to_json()))


if __name__ == "__main__":
    main()

"""Answering HTTP in one process: the application, and the server that drains before it leaves."""

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.engine.client import EngineClient
from outrider.engine.config import EngineConfig
from outrider.engine.grammar_compiler import GrammarCompiler
from outrider.server.app import create_app
from outrider.server.middleware import Gate
from outrider.server.settings import ServerSettings, Settings
from outrider.server.tokenizer import Tokenizer

log = logging.getLogger("outrider.server")

# Longer than clients keep idle connections, so that none is closed under a request of theirs.
KEEP_ALIVE_S = 75
HEAD_TIMEOUT_S = 60  # for a request's first line and headers; its body has a time of its own
MAX_HEAD_BYTES = 65_536
FAREWELL_S = 2  # for the last bytes to reach their clients once the engine has stopped


async def load_app(
    settings: Settings, config: EngineConfig, client: EngineClient, gate: Gate
) -> ASGIApp:
    """The application, with the tokenizer and the grammars of the engine's target."""
    tokenizer = await asyncio.to_thread(
        Tokenizer.load, Path(config.target.path), trust_remote_code=config.target.trust_remote_code
    )
    compiler = None
    if config.token_table is not None and config.eos_token_ids and config.vocab_size is not None:
        compiler = await asyncio.to_thread(
            GrammarCompiler, config.token_table, config.eos_token_ids, config.vocab_size
        )
    return create_app(
        client,
        tokenizer,
        gate,
        model_name=settings.served_model_name,
        settings=settings.server,
        compiler=compiler,
    )


class Connection(HttpToolsProtocol):
    """Uvicorn's, but closed where the head of a request takes long to come, or has no end."""

    _timer: asyncio.TimerHandle | None = None  # runs while a head is awaited
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        awaited = self._timer
        super().data_received(data)
        if awaited is not None and awaited is self._timer:  # the same head still
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The head of the request exceeds {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # not the first request
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_is_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """Uvicorn, but a signal first turns new requests away and lets running ones finish."""

    def __init__(
        self, app: ASGIApp, gate: Gate, client: EngineClient, settings: ServerSettings
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FAREWELL_S,
            )
        )
        self._gate = gate
        self._client = client
        self._shutdown_timeout_s = settings.shutdown_timeout_s
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()

    @property
    def leaving(self) -> bool:
        return self._draining is not None

    async def listening(self) -> None:
        """Wait until connections are taken."""
        await self._listening.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._leave, sig)

    def drain(self) -> None:
        """Take no new requests, let those under way finish, and leave."""
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    def _leave(self, sig: int) -> None:
        if not self.leaving:
            log.info("shutting down: no new requests; Ctrl-C again leaves at once")
        elif sig == signal.SIGINT:
            os._exit(130)  # the engine process ends with this one
        self.drain()

    async def _drain(self) -> None:
        self._gate.open = False
        if not await self._gate.drained(self._shutdown_timeout_s):
            log.warning("requests under way are ended after %g s", self._shutdown_timeout_s)
        await self._client.stop()
        await self._gate.drained(FAREWELL_S)
        self.should_exit = True

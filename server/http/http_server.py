"""Answers HTTP in one process: the application, and a server that drains before it exits."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.engine.processes.client import EngineClient
from outrider.engine.processes.heap import give_memory_back
from outrider.kernels.reached import check_reached

from ..api.sampling_defaults import sampling_defaults
from ..config.server_settings import ServerSettings
from ..models.prepare import Prepared
from ..text.tokenizer import Tokenizer
from .app import create_app
from .connection import KEEP_ALIVE_S, HttpConnection, Unsent
from .middleware import EarlyAnswer, Gate

log = logging.getLogger("outrider.server")

check_reached(
    "uvicorn", uvicorn.Server, "handle_exit", "on_tick", "server_state", "should_exit", "startup"
)

SWEEP_TICKS = 5  # ticks of uvicorn's loop, 0.1 s each
# Until Python looks for garbage. By default after 700, which took half of the time of large bodies
# of small objects. Hardly a request leaves garbage that only such a search would find: a chat that
# its template refuses does, with all that was sent.
NEW_OBJECTS = 10_000
# Until a thread that waits for Python's lock gets it. By default 5 ms, for each of the few turns of
# a text that a thread tokenizes while the event loop is busy.
LOCK_S = 0.001
FAREWELL_S = 2  # time for the last bytes to reach their clients after the engine has stopped


async def load_app(prepared: Prepared, client: EngineClient, gate: Gate) -> ASGIApp:
    """The application, with the tokenizer and the grammars of the engine's target."""
    settings, config = prepared.settings, prepared.engine
    tokenizer = await asyncio.to_thread(Tokenizer, prepared.tokenizer)
    compiler = None
    if config.token_table is not None and config.eos_token_ids and config.vocab_size is not None:
        compiler = await asyncio.to_thread(
            GrammarCompiler, config.token_table, config.eos_token_ids, config.vocab_size
        )
        compiler.warm_up()
    app = create_app(
        client,
        tokenizer,
        gate,
        settings,
        compiler=compiler,
        sampling_defaults=sampling_defaults(
            settings.server.generation_config, Path(config.target.path)
        ),
    )
    gc.collect()
    gc.freeze()  # what is loaded stays
    gc.set_threshold(NEW_OBJECTS)
    sys.setswitchinterval(LOCK_S)
    give_memory_back()
    return app


class Server(uvicorn.Server):
    """Uvicorn; but on a signal, new requests are refused and running ones may finish first."""

    def __init__(
        self, app: ASGIApp, gate: Gate, client: EngineClient, settings: ServerSettings
    ) -> None:
        limits = {
            "max_connections": settings.max_connections,
            "send_timeout_s": settings.send_timeout_s,
            "prefix": settings.root_path,
            "unsent": Unsent(settings.max_unsent_bytes),
        }
        super().__init__(
            uvicorn.Config(
                EarlyAnswer(app),
                http=type("HttpConnection", (HttpConnection,), limits),
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
        """Wait until connections are accepted."""
        await self._listening.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, HttpConnection)
                connection.sweep(self._loop.time())
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._leave, sig)

    def drain(self) -> None:
        """Refuse new requests, let running ones finish, and exit."""
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
        if not await self._gate.drained(FAREWELL_S):
            for connection in list(self.server_state.connections):
                connection.transport.abort()  # nobody reads; uvicorn would cancel with a traceback
            await self._gate.drained(FAREWELL_S)
        self.should_exit = True

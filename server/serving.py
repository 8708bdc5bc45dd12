"""`outrider serve`: bring the pair up, answer requests, drain and leave."""

import asyncio
import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn
import uvloop
from rich.console import Console
from starlette.types import ASGIApp

from outrider.engine.client import EngineClient, EngineUnavailableError
from outrider.engine.grammar_compiler import GrammarCompiler
from outrider.engine.process_engine import ProcessEngine
from outrider.server.app import create_app
from outrider.server.console import configure_logging, report_status, show_summary
from outrider.server.middleware import Gate
from outrider.server.models.pair import Pair, engine_config, prepare_pair
from outrider.server.models.store import ModelError
from outrider.server.progress import ProgressDisplay
from outrider.server.settings import ServerSettings, Settings
from outrider.server.tokenizer import Tokenizer

log = logging.getLogger("outrider.server")

# Longer than clients keep idle connections, so that none is closed under a request of theirs.
KEEP_ALIVE_S = 75
FAREWELL_S = 2  # for the last bytes to reach their clients once the engine has stopped


def serve(settings: Settings) -> int:
    """Serve until a signal; returns the exit code."""
    # The stream itself, not whatever sys.stderr is later: conversions redirect that.
    console = Console(file=sys.stderr)
    configure_logging(settings.server.log_level, settings.server.log_format, console)
    # Until uvicorn takes over; a container's first process would not even end of SIGTERM otherwise.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        listener = bind(settings.server.host, settings.server.port)
        with ProgressDisplay(console) as progress:
            pair = prepare_pair(settings, progress)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, pair, listener, console))
    except (ModelError, OSError) as error:
        log.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130


def bind(host: str, port: int) -> socket.socket:
    """The listening address, taken before anything slow is done. Raises OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose others with --host "
            "and --port"
        ) from None
    return listener


async def _serve(settings: Settings, pair: Pair, listener: socket.socket, console: Console) -> int:
    gate = Gate()
    progress = ProgressDisplay(console)
    client = ProcessEngine(
        engine_config(settings, pair),
        progress,
        step_timeout_s=settings.engine.step_timeout_s or None,
        log_format=settings.server.log_format,
    )
    tasks: list[asyncio.Task[object]] = [starting := asyncio.create_task(client.start())]
    try:
        tokenizer = await asyncio.to_thread(
            Tokenizer.load, pair.target, trust_remote_code=settings.target.trust_remote_code
        )
        compiler = None
        if pair.token_table is not None and pair.eos_token_ids:
            compiler = await asyncio.to_thread(
                GrammarCompiler, pair.token_table, pair.eos_token_ids, pair.vocab_size
            )
        app = create_app(
            client,
            tokenizer,
            gate,
            model_name=settings.served_model_name,
            settings=settings.server,
            compiler=compiler,
        )
        server = Server(app, gate, client, settings.server)
        tasks.append(serving := asyncio.create_task(server.serve(sockets=[listener])))
        with progress:
            await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
        try:
            info = await starting
        except EngineUnavailableError as error:
            if gate.open:
                log.error("%s", error)
                return 1
        else:
            show_summary(settings, info, _url(listener, settings.server), console)
            if settings.server.status_interval_s:
                reporting = report_status(client, settings.server.status_interval_s)
                tasks.append(asyncio.create_task(reporting))
        await serving
        return 0
    finally:
        await client.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _url(listener: socket.socket, settings: ServerSettings) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_key is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Server(uvicorn.Server):
    """Uvicorn, but a signal first turns new requests away and lets running ones finish."""

    def __init__(
        self, app: ASGIApp, gate: Gate, client: EngineClient, settings: ServerSettings
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._leave, sig)

    def _leave(self, sig: int) -> None:
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
        elif sig == signal.SIGINT:
            os._exit(130)  # the engine process ends with this one

    async def _drain(self) -> None:
        self._gate.open = False
        log.info("shutting down: no new requests; Ctrl-C again leaves at once")
        if not await self._gate.drained(self._shutdown_timeout_s):
            log.warning("requests under way are ended after %g s", self._shutdown_timeout_s)
        await self._client.stop()
        await self._gate.drained(FAREWELL_S)
        self.should_exit = True

"""`outrider serve`: load the pair, answer requests, drain and exit."""

import asyncio
import logging
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from outrider.engine.config import EngineConfig
from outrider.engine.processes.client import EngineUnavailableError
from outrider.engine.processes.process_engine import ProcessEngine

from ..api.sampling_defaults import NEUTRAL, sampling_defaults
from ..config.server_settings import ServerSettings
from ..config.settings import Settings
from ..http.hosts import is_loopback
from ..http.http_server import Server, load_app
from ..http.listeners import bind, bind_unix, share
from ..http.middleware import Gate
from ..http.workers import WorkerError, Workers
from ..models.prepare import Prepared, prepare
from ..models.store import ModelError
from ..observe.logs import configure_logging
from ..observe.tracing import TracingError
from ..text.message_format import MessageFormat
from .console import report_status, show_summary
from .progress import ProgressDisplay
from .signals import be_cancelled_by, be_interrupted_by

log = logging.getLogger("outrider.server")

OTHER_FILES = 256  # files that a process may have open besides its connections


def serve(settings: Settings) -> int:
    """Serve until a signal; returns the exit code."""
    # The present stream, because conversions redirect sys.stderr later.
    console = Console(file=sys.stderr)
    configure_logging(settings.server.log_level, settings.server.log_format, console)
    be_interrupted_by(signal.SIGTERM)
    try:
        prepare_for_clients(settings.server)
        listeners = [
            bind(settings.server.host, settings.server.port)
            if settings.server.uds is None
            else bind_unix(settings.server.uds)
        ]
        if settings.server.metrics_port is not None:
            remedy = "choose another server.metrics_port"
            listeners.append(bind(settings.server.host, settings.server.metrics_port, remedy))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, listeners, console))
    except (ModelError, TracingError, WorkerError, OSError) as error:
        log.error("%s", error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def prepare_for_clients(settings: ServerSettings) -> None:
    """Check keys and certificate, which each process reads for itself, warn of what is open to
    everybody, and allow enough files for all connections. Raises OSError.
    """
    keys = settings.read_api_keys()
    settings.check_certificate()
    if not keys and settings.uds is None and not is_loopback(settings.host):
        log.warning(
            "whoever can reach %s may use this server: it asks for no key (server.api_key_file, "
            "server.api_keys), and listens beyond this machine (server.host)",
            settings.host,
        )
    wanted = settings.max_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        log.warning(
            "%d connections (server.max_connections) need some %d open files, and this process may "
            "have %d: lower the one, or raise the other (ulimit -n)",
            settings.max_connections,
            wanted,
            hard,
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))  # children inherit it


async def _serve(settings: Settings, listeners: list[socket.socket], console: Console) -> int:
    be_cancelled_by(signal.SIGTERM)
    display = ProgressDisplay(console, log.info)
    preparing = asyncio.create_task(prepare(settings, display))

    async def engine_config() -> EngineConfig:
        return (await preparing).engine

    engine = ProcessEngine(
        engine_config,
        display,
        step_timeout_s=settings.engine.step_timeout_s,
        log_format=settings.server.log_format,
        is_shared=settings.server.api_workers > 1,
    )
    tasks: list[asyncio.Future[Any]] = [preparing, starting := asyncio.create_task(engine.start())]
    try:
        with display:
            prepared = await preparing
            settings = prepared.settings
            defaults = sampling_defaults(
                settings.server.generation_config, Path(prepared.engine.target.path)
            )
            if defaults != NEUTRAL:
                log.info("sampling: %s, unless a request says otherwise", defaults)
            front = await _front(prepared, engine)
            shared = [share(listener, settings.server.api_workers) for listener in listeners]
            sockets = [own for process in zip(*shared, strict=True) for own in process]
            serving: asyncio.Future[Any] = asyncio.create_task(front.serve(sockets))
            up: asyncio.Future[Any] = asyncio.gather(starting, front.listening())
            tasks += serving, up
            await asyncio.wait({up, serving}, return_when=asyncio.FIRST_COMPLETED)
        if up.done():
            try:
                info, _ = await up
            except EngineUnavailableError as error:
                if not front.leaving:
                    log.error("%s", error)
                    return 1
            else:
                form = MessageFormat.of(prepared.tokenizer, settings.server)
                url = _url(listeners[0], settings.server)
                show_summary(settings, info, form, url, console)
                if settings.server.status_interval_s:
                    reporting = report_status(engine, settings.server.status_interval_s)
                    tasks.append(asyncio.create_task(reporting))
                tasks.append(ended := asyncio.create_task(engine.ended()))
                await asyncio.wait({ended, serving}, return_when=asyncio.FIRST_COMPLETED)
                if engine.state == "failed":  # only a new start could help
                    log.error("%s", engine.status_reason)
                    front.drain()
                    await serving
                    return 1
        await serving
        return 0
    finally:
        if settings.server.uds is not None:
            settings.server.uds.unlink(missing_ok=True)
        await engine.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _front(prepared: Prepared, engine: ProcessEngine) -> Server | Workers:
    """What answers HTTP: this process, or several others."""
    settings = prepared.settings.server
    if settings.api_workers > 1:
        return Workers(prepared, engine)
    gate = Gate()
    return Server(await load_app(prepared, engine, gate), gate, engine, settings)


def _url(listener: socket.socket, settings: ServerSettings) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_key is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

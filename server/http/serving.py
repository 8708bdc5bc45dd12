"""`outrider serve`: load the pair, answer requests, drain and exit."""

import asyncio
import errno
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
from ..cli.console import configure_logging, report_status, show_summary
from ..cli.progress import ProgressDisplay
from ..config.server_settings import ServerSettings
from ..config.settings import Settings
from ..models.prepare import Prepared, prepare
from ..models.store import ModelError
from ..observe.tracing import TracingError
from .connection import MIN_READ_BYTES
from .hosts import is_loopback
from .http_server import Server, load_app
from .middleware import Gate
from .workers import WorkerError, Workers

log = logging.getLogger("outrider.server")

OTHER_FILES = 256  # files that a process may have open besides its connections


def serve(settings: Settings) -> int:
    """Serve until a signal; returns the exit code."""
    # The present stream, because conversions redirect sys.stderr later.
    console = Console(file=sys.stderr)
    configure_logging(settings.server.log_level, settings.server.log_format, console)
    # Without a handler SIGTERM would not even end a container's first process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
    everybody, and allow enough files for all connections. Raises OSError."""
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


def bind(
    host: str, port: int, remedy: str = "choose others with --host and --port"
) -> socket.socket:
    """Listen at an address, before anything slow is done. Raises OSError.

    Clients wait until the pair is prepared. A socket that is only bound would refuse them, but also
    let another server bind the same address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _show_what_clients_read(listener)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}; {remedy}") from None
    return listener


def _show_what_clients_read(listener: socket.socket) -> None:
    """Have the kernel hold little of an answer that the client has no room for. It may hold
    megabytes, and ask for more only once a third of them is gone: `server.send_timeout_s` and
    `server.max_unsent_bytes` would not see what a slow client reads, or has yet to read."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MIN_READ_BYTES)


def bind_unix(path: Path) -> socket.socket:
    """Listen at this path; replaces the socket of a dead server. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        raise OSError(f"cannot listen at {path}: {error.strerror}") from None
    return listener


def share(listener: socket.socket, num_sockets: int) -> list[socket.socket]:
    """Several sockets of one address, over which the kernel spreads connections.

    If all processes accepted from one socket, each in turn would take a whole burst of them.
    """
    if num_sockets == 1:
        return [listener]
    # Set after the first listens, so that a port of another server is still an error.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listeners = [listener]
    for _ in range(num_sockets - 1):
        listeners.append(socket.socket(listener.family, listener.type, listener.proto))
        listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _show_what_clients_read(listeners[-1])
        listeners[-1].bind(listener.getsockname())
    return listeners


async def _serve(settings: Settings, listeners: list[socket.socket], console: Console) -> int:
    _be_cancelled_by(signal.SIGTERM)
    progress = ProgressDisplay(console, log.info)
    preparing = asyncio.create_task(prepare(settings, progress))

    async def engine_config() -> EngineConfig:
        return (await preparing).engine

    engine = ProcessEngine(
        engine_config,
        progress,
        step_timeout_s=settings.engine.step_timeout_s,
        log_format=settings.server.log_format,
        is_shared=settings.server.api_workers > 1,
    )
    tasks: list[asyncio.Future[Any]] = [preparing, starting := asyncio.create_task(engine.start())]
    try:
        with progress:
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
                show_summary(settings, info, _url(listeners[0], settings.server), console)
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


def _be_cancelled_by(sig: signal.Signals) -> None:
    """Cancel the running task on this signal, as asyncio does on Ctrl-C, until uvicorn takes over.

    An exception from the signal's handler could come anywhere: between opening a socket and the
    line that sees to its end, say, and then the process would wait for that socket for ever.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    signal.signal(sig, cancel)


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

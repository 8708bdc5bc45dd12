"""One of several HTTP processes: answers requests with an engine that its parent owns.

Started by `Workers` as `python -P -m outrider.server.http.worker ENDPOINT LISTENER_FD...`, with
settings and `EngineConfig` as two lines of JSON on its stdin.
"""

import asyncio
import logging
import socket
import sys

import msgspec
import uvloop
from rich.console import Console

from outrider.engine.config import EngineConfig
from outrider.engine.processes.child_process import leave_with_parent
from outrider.engine.processes.shared_engine import SharedEngine

from ..cli.console import configure_logging
from ..config.settings import Settings
from ..observe.tracing import TracingError
from .http_server import Server, load_app
from .middleware import Gate

log = logging.getLogger("outrider.server")


def main() -> None:
    endpoint, *listener_fds = sys.argv[1:]
    settings_line, config_line = leave_with_parent(num_lines=2)
    settings = Settings.model_validate_json(settings_line)
    config = msgspec.json.decode(config_line, type=EngineConfig)
    configure_logging(
        settings.server.log_level, settings.server.log_format, Console(file=sys.stderr)
    )
    listeners = [socket.socket(fileno=int(fd)) for fd in listener_fds]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_work(settings, config, endpoint, listeners))
        except (OSError, TracingError) as error:
            log.error("%s", error)
            sys.exit(1)


async def _work(
    settings: Settings, config: EngineConfig, endpoint: str, listeners: list[socket.socket]
) -> None:
    gate = Gate()
    client = SharedEngine(endpoint, on_shutdown=lambda: server.drain())
    app = await load_app(settings, config, client, gate)
    server = Server(app, gate, client, settings.server)
    starting = asyncio.create_task(client.start())
    await client.has_heard.wait()  # so that none is turned away who would not be a moment later

    async def report() -> None:
        await server.listening()
        client.report_up()

    reporting = asyncio.create_task(report())
    await server.serve(sockets=listeners)
    await asyncio.gather(starting, reporting, return_exceptions=True)


if __name__ == "__main__":
    main()

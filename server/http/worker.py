"""One of several HTTP processes: answers requests with an engine that its parent owns.

Started by `Workers` as `python -P -m outrider.server.http.worker LISTENER_FD... ENDPOINT`, with
what `Prepared` says as one line of JSON on its stdin.
"""

import asyncio
import logging
import socket
import sys

import uvloop
from rich.console import Console

from outrider.engine.lifeline import leave_with_parent
from outrider.engine.processes.shared_engine import SharedEngine

from ..models.prepare import Prepared
from ..observe.logs import configure_logging
from ..observe.tracing import TracingError
from .http_server import Server, load_app
from .middleware import Gate

log = logging.getLogger("outrider.server")


def main() -> None:
    *listener_fds, endpoint = sys.argv[1:]
    prepared = Prepared.from_json(leave_with_parent())
    settings = prepared.settings.server
    configure_logging(settings.log_level, settings.log_format, Console(file=sys.stderr))
    listeners = [socket.socket(fileno=int(fd)) for fd in listener_fds]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_work(prepared, endpoint, listeners))
        except (OSError, TracingError) as error:
            log.error("%s", error)
            sys.exit(1)


async def _work(prepared: Prepared, endpoint: str, listeners: list[socket.socket]) -> None:
    gate = Gate()
    client = SharedEngine(endpoint, on_shutdown=lambda: server.drain())
    app = await load_app(prepared, client, gate)
    server = Server(app, gate, client, prepared.settings.server)
    starting = asyncio.create_task(client.start())
    await client.has_heard.wait()  # do not refuse requests while the engine's state is unknown

    async def report() -> None:
        await server.listening()
        client.report_up()

    reporting = asyncio.create_task(report())
    await server.serve(sockets=listeners)
    await asyncio.gather(starting, reporting, return_exceptions=True)


if __name__ == "__main__":
    main()

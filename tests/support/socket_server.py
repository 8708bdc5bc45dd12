"""The application over a scripted engine, behind a real socket in a thread of this process."""

import asyncio
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn.server
import uvloop
from served import Served

from outrider.server.config.server_settings import ServerSettings
from outrider.server.http.http_server import Server
from outrider.server.http.listeners import bind, bind_unix


class _Impatient:
    """asyncio as uvicorn sees it: it sleeps a tenth of its time between two looks at whether it is
    to leave, at connections, and at what has ended.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / 10)


uvicorn.server.asyncio = _Impatient()  # type: ignore[assignment]


def own_certificate(folder: Path) -> dict[str, Path]:
    """Settings with a new certificate of 127.0.0.1, which signs itself. Needs openssl."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return {"tls_certificate": certificate, "tls_key": key}


@contextmanager
def on_a_socket(
    served: Served, *, send_buffer_bytes: int | None = None, **settings: Any
) -> Iterator[str]:
    """Serve until the block ends, with these settings of the socket; gives the server's URL.

    With the setting `uds`, that is of no use: connect to the socket at this path.
    """
    uds = settings.get("uds")
    listener = bind("127.0.0.1", 0) if uds is None else bind_unix(uds)
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    started = threading.Event()
    servers: list[Server] = []

    async def run() -> None:
        server = Server(served.app, served.gate, served.client, ServerSettings(**settings))
        servers.append(server)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        started.set()
        await serving

    def live() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())  # and end what still waits, as the server does

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    started.wait(10)
    try:
        scheme = "https" if "tls_key" in settings else "http"
        yield "" if uds else "{}://{}:{}".format(scheme, *listener.getsockname())
    finally:
        servers[0].should_exit = True
        thread.join(10)

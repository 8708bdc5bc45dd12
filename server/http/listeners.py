"""The sockets at which clients arrive."""

import errno
import socket
from pathlib import Path

from .connection import MIN_READ_BYTES


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
    `server.max_unsent_bytes` would not see what a slow client reads, or has yet to read.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MIN_READ_BYTES)


def bind_unix(path: Path) -> socket.socket:
    """Listen at this path; replaces the socket of a dead server. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and not path.is_socket():
            raise FileExistsError(errno.EEXIST, "something else than a socket is there")
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        why = error.strerror or error  # a path that is too long has no number of an error
        raise OSError(f"cannot listen at {path} (server.uds): {why}") from None
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

"""A follower's process: loads its share of the target, and perhaps of the draft, then runs what
rank 0 sends.

Started by `Followers` as `python -P -m outrider.engine.ranks.follower FD`, with a socket to rank 0
as that file descriptor, and a line on its stdin with what it must know. It logs nothing: what goes
wrong is sent to rank 0, once.
"""

import logging
import os
import pickle
import socket
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

from ..lifeline import leave_with_parent
from ..state.phase import Shape
from .wire import Op, receive, send

if TYPE_CHECKING:
    from ..config import EngineConfig
    from .own_shares import OwnShares

_BEAT_S = 1.0


class FollowerConnection:
    """This end of the socket, for two threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, op: Op, integers_np: np.ndarray) -> None:
        with self._lock:
            send(self._connection, op, (), integers_np)

    def receive(self) -> tuple[Op, Shape, np.ndarray]:
        return receive(self._connection)

    def beat(self) -> None:
        """Say now and then that this process lives, whatever it does."""
        try:
            while True:
                self.send(Op.ALIVE, np.zeros(0, dtype=np.int64))
                threading.Event().wait(_BEAT_S)
        except OSError:
            os._exit(1)


def follow(
    connection: FollowerConnection, rank: int, meeting_fd: int, config: "EngineConfig"
) -> None:
    """Load, then do what rank 0 says, for ever."""
    from .own_shares import OwnShares

    shares = OwnShares(rank, config)
    connection.send(Op.ANSWER, np.array([shares.batch_invariant], dtype=np.int64))
    op, _, [keep_bits] = connection.receive()
    assert op == Op.JOIN
    shares.join(meeting_fd, keep_bits=bool(keep_bits))
    while True:
        answer = perform(shares, *connection.receive())
        if answer is not None:
            connection.send(Op.ANSWER, np.array(answer, dtype=np.int64))


def perform(
    shares: "OwnShares", op: Op, shape: Shape, integers_np: np.ndarray
) -> int | list[int] | None:
    """Returns what to answer, if rank 0 waits for an answer."""
    match op:
        case Op.RUN:
            shares.run(shape[0], shape[1:], integers_np)
        case Op.PAGES:
            shares.slots.write_pages(integers_np.reshape(3, -1))
        case Op.TAP:
            shares.networks[shape[0]].tap(integers_np.tolist())
        case Op.COPY_STATES:
            shares.copy_states(shape[0], integers_np.reshape(-1, 2))
        case Op.CAPTURE:
            shares.networks[shape[0]].phase.capture(integers_np, shape[1:])
        case Op.BIND:
            shares.bind(integers_np.tolist())
            return 0  # that it is done
        case Op.COMPILE:
            shares.compile(*integers_np.tolist())
            return 0
        case Op.HOST:
            shares.allocate_host(integers_np.tolist())
            return 0
        case Op.SAVE:
            shares.save(shape[0], integers_np.reshape(2, -1))
        case Op.LOAD:
            shares.load(shape[0], integers_np.reshape(2, -1))
        case Op.LOADED:
            return shares.loaded()
        case Op.MEASURE:
            shares.measure()
        case Op.MEASURED:
            shares.measured()
        case Op.ROOM:
            return shares.room()
        case _:
            raise ValueError(f"rank 0 sent {op!r}, which a follower does not know")
    return None


def main() -> None:
    logging.disable(logging.CRITICAL)
    connection = FollowerConnection(socket.socket(fileno=int(sys.argv[1])))
    line = leave_with_parent(lambda: __import__("torch"))
    threading.Thread(target=connection.beat, name="heartbeat", daemon=True).start()
    try:
        follow(connection, *pickle.loads(bytes.fromhex(line.decode())))
    except EOFError:  # rank 0 has gone
        os._exit(1)
    except Exception as error:
        reason_np = np.frombuffer(why_failed(error).encode(), np.uint8)
        connection.send(Op.FAILED, reason_np.astype(np.int64))
        os._exit(1)


def why_failed(error: Exception) -> str:
    """In words for whoever starts the server."""
    from ..config import ConfigError
    from ..gpu_memory import OutOfDeviceMemoryError, is_full, no_room

    if isinstance(error, RuntimeError) and is_full(error):
        error = no_room(error)
    is_for_users = isinstance(error, ConfigError | OutOfDeviceMemoryError)
    return str(error) if is_for_users else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()

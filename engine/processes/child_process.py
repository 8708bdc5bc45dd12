"""A child process at the other end of a private socket. It never outlives its parent.

Its last argument is the endpoint that it binds its socket to. It reads one line from its stdin, a
socket that stays open as long as the parent lives. The line may come later than the process starts:
the process can import its libraries meanwhile. The reason why it ends may come back there.
"""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from ..lifeline import MOST_WORDS
from .connection import Connection, ZmqContext

RESTART_DELAYS_S = (0.0, 2.0)  # after the first and the second death in a row; the third is final
HEALTHY_S = 60.0  # after so long ready, a death is the first of a new row
_SILENCE_S = 0.1  # after so much silence, no more messages of a dead child will arrive

T = TypeVar("T")


class ChildProcess(Generic[T]):
    """The parent's end. The socket's private directory is deleted after the child's first message:
    then nothing is left behind, however either process ends. If the child `is_shared`, the
    directory stays, so that others can connect as long as the child lives; a parent that is killed
    leaves it behind, with the socket and nothing else.
    """

    def __init__(
        self,
        context: ZmqContext,
        command: Sequence[str],
        *,
        line: bytes | Callable[[], Awaitable[bytes]],
        decoder: "msgspec.msgpack.Decoder[T]",
        hear: Callable[[T], None],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        is_shared: bool = False,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="outrider-")
        endpoint = f"ipc://{self._directory.name}/socket"
        self.connection = Connection(context, endpoint, decoder, self._hear_first)
        self._command = command
        self._line = line
        self._hear = hear
        self._environment = environment
        self._pass_fds = pass_fds
        self._is_shared = is_shared
        self._process: asyncio.subprocess.Process | None = None  # once it is started
        self._is_killed = False
        self.last_words = ""  # of a child that has ended: see `lifeline.leave_at_once`

    async def run(self) -> int:
        """Start the child and handle its messages until it ends; returns its exit code."""
        ours, theirs = socket.socketpair()  # when ours is closed, the child ends
        with self._directory, contextlib.closing(self.connection), ours:
            ours.setblocking(False)
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    self.connection.endpoint,
                    env=self._environment,
                    stdin=theirs.fileno(),
                    start_new_session=True,  # signals to our group must not reach it: we may drain
                    pass_fds=self._pass_fds,
                )
            self._process = process
            try:
                if self._is_killed:
                    process.kill()
                line = await self._line() if callable(self._line) else self._line
                with contextlib.suppress(OSError):  # it has ended
                    await asyncio.get_running_loop().sock_sendall(ours, line + b"\n")
                exit_code = await process.wait()
                with contextlib.suppress(OSError):  # there are none
                    self.last_words = ours.recv(MOST_WORDS).decode(errors="replace")
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await asyncio.sleep(_SILENCE_S)
        return exit_code

    def kill(self) -> None:
        """Kill the child now or, if it is just being started, as soon as it has."""
        self._is_killed = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _hear_first(self, message: T) -> None:
        if not self._is_shared:
            self._directory.cleanup()  # both ends are connected, and nobody else should be
        self.connection.hear = self._hear
        self._hear(message)


class Restarts:
    """Decides whether a child that died is started again, and when."""

    def __init__(self) -> None:
        self._deaths_in_a_row = 0

    def delay_s(self, ready_s: float) -> float | None:
        """How long to wait after the death of a child that was ready for `ready_s`; None if it
        keeps dying, so that starting it again is useless.
        """
        self._deaths_in_a_row = 1 if ready_s >= HEALTHY_S else self._deaths_in_a_row + 1
        if self._deaths_in_a_row > len(RESTART_DELAYS_S):
            return None
        return RESTART_DELAYS_S[self._deaths_in_a_row - 1]

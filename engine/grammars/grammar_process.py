"""The engine's end of the processes that hold grammars."""

import contextlib
import itertools
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from concurrent.futures import Future
from threading import Lock
from typing import Any

import msgspec

from .allowance import Allowance
from .grammar_messages import (
    Answers,
    Begin,
    GrammarAnswer,
    Question,
    Questions,
    Syntax,
    Table,
    Verdict,
    receive,
    send,
)

_GRACE_S = 10.0  # to start up; normally the process ends itself in time
_ANSWER_S = 10.0
_LEAVE_S = 2.0

_TOO_MUCH = (
    "it takes more time or memory than a grammar may, or nests too deeply; make it smaller or "
    "less ambiguous"
)
_KILLED = "its process was ended from outside; try again"


class GrammarProcess:
    """One grammar's process, which ends when this object is deleted.

    `error` says why the grammar cannot be used, or no longer; `was_killed` that something outside
    ended the process, and the grammar may be good.
    """

    begun: "Future[Verdict]"  # of the call of `begin`, for a grammar that sequences follow

    def __init__(self, zygote: "Zygote") -> None:
        self.error: str | None = None
        self.was_killed = False
        self._zygote = zygote
        self._connection: socket.socket | None = None
        self._lifeline: socket.socket | None = None
        self._is_closed = False
        self._numbers = itertools.count()
        self._sequences: set[int] = set()  # those that have not ended
        self._ended: list[int] = []  # those that the process does not know of yet
        self._decoder = msgspec.msgpack.Decoder(Answers)
        self.allowance = Allowance()

    def begin(self, syntax: Syntax, text: str, timeout_s: float) -> Verdict:
        """Compile; raises OSError if no process can be started, or if it was ended from outside."""
        if self._is_closed:
            return Verdict("", "it was given up before it was compiled")
        connection, self._lifeline = self._zygote.fork()
        self._connection = connection
        if self._is_closed:  # by a thread that may have found neither
            self.close()
        start_s = time.monotonic()
        connection.settimeout(timeout_s + _GRACE_S)
        try:
            send(connection, Begin(syntax, text, timeout_s))
            verdict = msgspec.msgpack.decode(receive(connection), type=Verdict)
        except UnicodeEncodeError:
            verdict = Verdict("", "it has half of a surrogate pair, which is no character")
        except (EOFError, OSError) as error:
            if self._ended_from_outside(error):
                self.close()
                raise OSError(_KILLED) from None
            verdict = Verdict("", _TOO_MUCH)
            if time.monotonic() - start_s >= timeout_s:
                reason = f"compiling it took longer than {timeout_s:g} s; make it smaller"
                verdict = Verdict("", reason, timed_out=True)
        self.error = verdict.error
        if self.error is not None:
            self.close()
        connection.settimeout(_ANSWER_S)
        return verdict

    def is_usable(self) -> bool:
        """Whether more sequences may follow the grammar. Cheap; call it while no answer is due."""
        if self._is_closed:
            return False
        if not self.begun.done():
            return True
        if self._connection is None:  # no process could be started
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if poll.poll(0):  # with no answer due, all there can be to read is the end
            self._fail(EOFError())
        return self.error is None

    def new_sequence(self) -> int:
        """A number for a sequence that follows the grammar until `end_sequence`."""
        number = next(self._numbers)
        self._sequences.add(number)
        return number

    def end_sequence(self, number: int) -> None:
        """Forget a sequence. If none is left, there is nobody to compile for any more."""
        self._sequences.discard(number)
        self._ended.append(number)
        if not self._sequences and not self.begun.done():
            self.close()

    def ask(self, questions: list[Question]) -> None:
        """Send questions; `answers` returns the answers."""
        ended, self._ended = self._ended, []
        if self.error is None and self._connection is not None:
            try:
                send(self._connection, Questions(ended, questions))
            except OSError as error:
                self._fail(error)

    def answers(self) -> list[GrammarAnswer]:
        """One for each question; none at all if the process died."""
        if self.error is None and self._connection is not None:
            try:
                answered = self._decoder.decode(receive(self._connection))
                self.allowance.charge(answered.spent_s, len(answered.answers))
                return answered.answers
            except (EOFError, OSError) as error:
                self._fail(error)
        return []

    def close(self) -> None:
        """End the process, whatever it is doing. May be called from any thread, and twice."""
        self._is_closed = True
        for end in (self._lifeline, self._connection):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it

    def _fail(self, error: Exception) -> None:
        self.was_killed = self._ended_from_outside(error)
        self.error = _KILLED if self.was_killed else _TOO_MUCH
        self.close()

    def _ended_from_outside(self, error: Exception) -> bool:
        """Whether the process died, and not of its grammar: then it has left no last words."""
        if self._is_closed or isinstance(error, TimeoutError) or self._lifeline is None:
            return False
        with contextlib.suppress(OSError):
            self._lifeline.settimeout(_LEAVE_S)
            return not self._lifeline.recv(1)
        return False

    def __del__(self) -> None:
        self.close()
        for end in (self._lifeline, self._connection):
            if end is not None:
                end.close()


class Zygote:
    """The process that grammar processes are forked from: warm, small and without threads."""

    def __init__(self, table: Table) -> None:
        self._table = msgspec.msgpack.encode(table)
        self._lock = Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def fork(self) -> tuple[socket.socket, socket.socket]:
        """A connection to a new fork, and its lifeline: a socket whose closing ends the fork."""
        connection, its = socket.socketpair()
        lifeline, its_lifeline = socket.socketpair()
        with its, its_lifeline:
            try:
                self.start()
                with self._lock:
                    try:
                        self._hand_over(its, its_lifeline)
                    except OSError:  # it reads no grammars, so it was killed from outside
                        self._start()
                        self._hand_over(its, its_lifeline)
            except BaseException:
                connection.close()
                lifeline.close()
                raise
        return connection, lifeline

    def start(self) -> None:
        """Start the process, unless that was done before."""
        with self._lock:
            if self._end is None:
                self._start()

    def _hand_over(self, *ends: socket.socket) -> None:
        socket.send_fds(self._control, [b"f"], [end.fileno() for end in ends])

    def _start(self) -> None:
        if self._end is not None:
            self._end()
        self._control, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as table:
            table.write(self._table)
            table.seek(0)
            command = [sys.executable, "-P", "-m", f"{__package__}.grammar_server"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=table,
                # A panic there would write parts of the grammar into our log.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._control, self.process)


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""From a grammar's text to where a sequence begins in it, each grammar in a process of its own."""

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock, Semaphore, Thread
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from outrider.engine.config import TokenTable
from outrider.engine.grammar import Grammar
from outrider.engine.grammar_process import (
    Ask,
    Begin,
    Begun,
    Questions,
    Syntax,
    Table,
    Told,
    receive,
    send,
)

T = TypeVar("T")

COMPILE_TIMEOUT_S = 10.0
MAX_COMPILES_AT_ONCE = 4
_MAX_IDLE = 8  # processes kept for sequences to come
_MAX_ACCEPTED = 256
_GRACE_S = 10.0  # to come up; the process ends itself in time, this is for one that cannot even
_ANSWER_S = 10.0
_LEAVE_S = 2.0

_TOO_MUCH = (
    "it takes more time or memory than a grammar may, or nests too deeply; make it smaller or "
    "less ambiguous"
)


class Verdict(NamedTuple):
    """A grammar in llguidance's dialect of Lark, or why it cannot be followed."""

    lark: str
    error: str | None
    timed_out: bool


class GrammarProcess:
    """Our end of one grammar's process; the process ends when this does.

    `error` says why the grammar cannot be followed (any more).
    """

    def __init__(self, zygote: "_Zygote") -> None:
        self.error: str | None = None
        self.lark = ""
        self.timed_out = False
        self._zygote = zygote
        self._connection: socket.socket | None = None
        self._lifeline_fd: int | None = None
        self._is_closed = False
        self._lock = Lock()
        self._sequences = itertools.count()
        self._dropped: deque[int] = deque()
        self._decoder = msgspec.msgpack.Decoder(list[Told])

    def begin(self, syntax: Syntax, text: str, timeout_s: float) -> "GrammarProcess":
        """Compile; raises OSError if there can be no process."""
        connection, lifeline_fd = self._zygote.fork()
        with self._lock:
            self._connection, self._lifeline_fd = connection, lifeline_fd
        if self._is_closed:
            self.close()
        start_s = time.monotonic()
        connection.settimeout(timeout_s + _GRACE_S)
        try:
            send(connection, Begin(syntax, text, timeout_s))
            begun = msgspec.msgpack.decode(receive(connection), type=Begun)
        except UnicodeEncodeError:
            self.error = "it has half of a surrogate pair, which is no character"
        except (EOFError, OSError):
            self._fail()
            if time.monotonic() - start_s >= timeout_s:
                self.timed_out = True
                self.error = f"compiling it took longer than {timeout_s:g} s; make it smaller"
        else:
            self.lark, self.error = begun.lark, begun.error
        if self.error is not None:
            self.close()
        connection.settimeout(_ANSWER_S)
        return self

    def is_alive(self) -> bool:
        """Whether more sequences may follow the grammar. Cheap; for a process that owes nothing."""
        if self.error is None and self._connection is not None:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if not poll.poll(0):  # all that there can be to read is the end
                return True
            self._fail()
        return False

    def new_sequence(self, grammar: Grammar) -> int:
        sequence = next(self._sequences)
        weakref.finalize(grammar, self._dropped.append, sequence).atexit = False
        return sequence

    def ask(self, asks: list[tuple[int, list[int], list[int], bool]]) -> None:
        """Put questions (grammar_process.Ask); `told` answers them."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if self.error is None and self._connection is not None:
            try:
                send(self._connection, Questions(dropped, [Ask(*ask) for ask in asks]))
            except OSError:
                self._fail()

    def told(self) -> list[Told]:
        """The answers, one for each question; none if the process is gone."""
        if self.error is None and self._connection is not None:
            try:
                return self._decoder.decode(receive(self._connection))
            except (EOFError, OSError):
                self._fail()
        return []

    def close(self) -> None:
        """End the process, whatever it is doing. Harmless from another thread, or twice."""
        with self._lock:
            self._is_closed = True
            if self._lifeline_fd is not None:
                os.close(self._lifeline_fd)
                self._lifeline_fd = None
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # whoever reads from it goes on

    def _fail(self) -> None:
        self.error = _TOO_MUCH
        self.close()

    def __del__(self) -> None:
        self.close()
        if self._connection is not None:
            self._connection.close()


class _Zygote:
    """The process that the grammars' processes are forked from: warm, small and without threads."""

    def __init__(self, table: Table) -> None:
        self._table = msgspec.msgpack.encode(table)
        self._lock = Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def fork(self) -> tuple[socket.socket, int]:
        """A connection to a new fork, and the write end of a pipe that ends it by its closing."""
        connection, theirs = socket.socketpair()
        broken_fd, lifeline_fd = os.pipe()
        try:
            self.start()
            with self._lock:
                try:
                    self._hand_over(theirs.fileno(), broken_fd)
                except OSError:  # it has died, though it reads no grammars: killed from outside
                    self._start()
                    self._hand_over(theirs.fileno(), broken_fd)
        except BaseException:
            connection.close()
            os.close(lifeline_fd)
            raise
        finally:
            theirs.close()
            os.close(broken_fd)
        return connection, lifeline_fd

    def start(self) -> None:
        """Have it come up, unless it has been started."""
        with self._lock:
            if self._end is None:
                self._start()

    def _hand_over(self, *fds: int) -> None:
        socket.send_fds(self._control, [b"f"], fds)

    def _start(self) -> None:
        if self._end is not None:
            self._end()
        self._control, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as table:
            table.write(self._table)
            table.seek(0)
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "outrider.engine.grammar_process",
                    str(theirs.fileno()),
                ],
                stdin=table,
                # What panics there would write parts of the grammar into our log.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.process = process
        self._end = weakref.finalize(self, _end, self._control, process)


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Compiling(NamedTuple):
    process: GrammarProcess
    begun: "Future[GrammarProcess]"
    waiting: "set[Future[Grammar]]"


class GrammarCompiler:
    """Has grammars compiled off this thread and this process, and keeps the latest.

    A grammar is a text in llguidance's dialect of Lark. What it costs the process that compiles and
    follows it, its death included, is no matter for this one.
    """

    def __init__(
        self,
        tokens: TokenTable,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        *,
        max_lexer_states: int = 50_000,
    ) -> None:
        if len(tokens.token_bytes) != vocab_size:
            raise ValueError(
                f"the token table describes {len(tokens.token_bytes)} of {vocab_size} tokens"
            )
        self._vocab_size = vocab_size
        self._eos_token_ids = [i for i in eos_token_ids if i < vocab_size]
        table = Table(
            list(tokens.token_bytes),
            list(tokens.special_token_ids),
            self._eos_token_ids,
            max_lexer_states,
        )
        self._zygote = _Zygote(table)
        self._slots = Semaphore(MAX_COMPILES_AT_ONCE)
        self._lock = Lock()
        self._compiling: dict[str, _Compiling] = {}
        self._compiled: OrderedDict[str, GrammarProcess] = OrderedDict()  # latest use last
        self._accepted: OrderedDict[tuple[Syntax, str], Verdict] = OrderedDict()

    def warm_up(self) -> None:
        """Start what the first grammar would otherwise wait for."""
        self._zygote.start()

    def check(self, syntax: Syntax, text: str, timeout_s: float) -> "Future[Verdict]":
        """Whether a grammar can be compiled, for somebody else to follow it. With OSError if there
        can be no process."""
        return self._run(lambda: self._check(syntax, text, timeout_s))

    def _check(self, syntax: Syntax, text: str, timeout_s: float) -> Verdict:
        with self._lock:
            if verdict := self._accepted.get((syntax, text)):
                self._accepted.move_to_end((syntax, text))
                return verdict
        process = GrammarProcess(self._zygote).begin(syntax, text, timeout_s)
        process.close()
        verdict = Verdict(process.lark, process.error, process.timed_out)
        if verdict.error is None:
            with self._lock:
                self._accepted[syntax, text] = verdict
                if len(self._accepted) > _MAX_ACCEPTED:
                    self._accepted.popitem(last=False)
        return verdict

    def start(self, grammar: str, stop_token_ids: Sequence[int] = ()) -> "Future[Grammar]":
        """Compile for one sequence, which these ids may end where the grammar may end.

        Cancelling the future ends the compilation, unless another sequence waits for it.
        """
        future: Future[Grammar] = Future()
        with self._lock:
            process = self._compiled.get(grammar)
            if process is not None and process.is_alive():
                self._compiled.move_to_end(grammar)
                future.set_result(self._grammar(process, stop_token_ids))
                return future
            compiling = self._compiling.get(grammar)
            if compiling is None:
                process = GrammarProcess(self._zygote)
                begun = self._run(partial(process.begin, "lark", grammar, COMPILE_TIMEOUT_S))
                compiling = self._compiling[grammar] = _Compiling(process, begun, set())
            compiling.waiting.add(future)

        def finish(begun: "Future[GrammarProcess]") -> None:
            self._keep(grammar, compiling)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._grammar(begun.result(), stop_token_ids))
                except BaseException as error:
                    future.set_exception(error)

        future.add_done_callback(lambda done: self._leave(grammar, compiling, done))
        compiling.begun.add_done_callback(finish)
        return future

    def _run(self, work: Callable[[], T]) -> "Future[T]":
        """On a thread for which nobody waits when this process leaves."""
        future: Future[T] = Future()

        def run() -> None:
            with self._slots:
                if future.set_running_or_notify_cancel():
                    try:
                        result = work()
                    except BaseException as error:
                        future.set_exception(error)
                    else:
                        future.set_result(result)

        Thread(target=run, name="grammar", daemon=True).start()
        return future

    def _keep(self, grammar: str, compiling: _Compiling) -> None:
        with self._lock:
            if self._compiling.get(grammar) is compiling:
                del self._compiling[grammar]
            if compiling.begun.cancelled() or compiling.begun.exception() is not None:
                return
            if compiling.process.error is None:
                self._compiled[grammar] = compiling.process
                self._compiled.move_to_end(grammar)
                if len(self._compiled) > _MAX_IDLE:
                    self._compiled.popitem(last=False)

    def _leave(self, grammar: str, compiling: _Compiling, future: "Future[Grammar]") -> None:
        """A sequence waits no more; if it was the last and gave up, the compilation ends."""
        with self._lock:
            compiling.waiting.discard(future)
            if not future.cancelled() or compiling.waiting:
                return
            if self._compiling.get(grammar) is compiling:
                del self._compiling[grammar]
        if not compiling.begun.cancel():
            compiling.process.close()

    def _grammar(self, process: GrammarProcess, stop_token_ids: Sequence[int]) -> Grammar:
        eos_mask = self._mask_of(self._eos_token_ids)
        return Grammar(process, eos_mask, eos_mask | self._mask_of(stop_token_ids))

    def _mask_of(self, token_ids: Sequence[int]) -> np.ndarray:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
        bits[[i for i in token_ids if i < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

"""Compiles grammars, each in a process of its own."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock, Semaphore, Thread
from typing import NamedTuple, TypeVar

import numpy as np

from ..config import TokenTable
from .grammar import Grammar
from .grammar_messages import Syntax, Table
from .zygote import GrammarProcess, Zygote

T = TypeVar("T")

COMPILE_TIMEOUT_S = 10.0
MAX_COMPILES_AT_ONCE = 4
_MAX_IDLE = 8  # processes kept for later sequences
_MAX_ACCEPTED = 256


class Verdict(NamedTuple):
    """A grammar in llguidance's dialect of Lark, or why it cannot be used."""

    lark: str
    error: str | None
    timed_out: bool


class _Compiling(NamedTuple):
    process: GrammarProcess
    begun: "Future[GrammarProcess]"
    waiting: "set[Future[Grammar]]"


class GrammarCompiler:
    """Has grammars compiled in other processes, and keeps the latest.

    A grammar is a text in llguidance's dialect of Lark. It may exhaust or kill the process that
    compiles and follows it; this process is not affected.
    """

    def __init__(
        self,
        tokens: TokenTable,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        *,
        max_lexer_states: int = 50_000,
        max_step_items: int = 10_000,
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
            max_step_items,
        )
        self._zygote = Zygote(table)
        self._slots = Semaphore(MAX_COMPILES_AT_ONCE)
        self._lock = Lock()
        self._compiling: dict[str, _Compiling] = {}
        self._compiled: OrderedDict[str, GrammarProcess] = OrderedDict()  # latest use last
        self._accepted: OrderedDict[tuple[Syntax, str], Verdict] = OrderedDict()

    def warm_up(self) -> None:
        """Start the process that the first grammar would otherwise have to wait for."""
        self._zygote.start()

    def check(self, syntax: Syntax, text: str, timeout_s: float) -> "Future[Verdict]":
        """Whether a grammar can be compiled. The future fails with OSError if no process starts."""
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
        """Compile for one sequence. Where the grammar may end, `stop_token_ids` may end it too.

        Cancelling the future stops the compilation, unless another sequence waits for it.
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
        """Run on a daemon thread, so that this process need not wait for it to exit."""
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
        """A sequence stops waiting. If it gave up and was the last, stop the compilation."""
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

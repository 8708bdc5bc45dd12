"""Compiles grammars, each in a process of its own."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock, Semaphore, Thread

from outrider.kernels.edits.token_mask import token_mask

from ..config import TokenTable
from .grammar import Grammar
from .grammar_messages import Syntax, Table, Verdict
from .grammar_process import GrammarProcess, Zygote

COMPILE_TIMEOUT_S = 10.0
MAX_COMPILES_AT_ONCE = 4
_MAX_KEPT = 8  # processes that are kept for later sequences
_MAX_ACCEPTED = 256


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
        eos_token_ids = [i for i in eos_token_ids if i < vocab_size]
        self._eos_mask = token_mask(eos_token_ids, vocab_size)
        table = Table(
            list(tokens.token_bytes),
            list(tokens.special_token_ids),
            eos_token_ids,
            max_lexer_states,
            max_step_items,
        )
        self._zygote = Zygote(table)
        self._compiling = Semaphore(MAX_COMPILES_AT_ONCE)
        self._lock = Lock()
        # Both: the latest use last. The salt comes first, as in the prefix cache: otherwise times
        # would show whether another client uses the same grammar.
        self._processes: OrderedDict[tuple[str, str], GrammarProcess] = OrderedDict()
        self._accepted: OrderedDict[tuple[str, Syntax, str], Verdict] = OrderedDict()

    def warm_up(self) -> None:
        """Start the process that the first grammar would otherwise have to wait for."""
        self._zygote.start()

    def check(
        self, syntax: Syntax, text: str, timeout_s: float, salt: str = ""
    ) -> "Future[Verdict]":
        """Whether a grammar can be compiled. The future fails with OSError if no process starts, or
        if it was ended from outside.
        """
        return self._run(lambda: self._check(salt, syntax, text, timeout_s))

    def _check(self, salt: str, syntax: Syntax, text: str, timeout_s: float) -> Verdict:
        key = salt, syntax, text
        with self._lock:
            if verdict := self._accepted.get(key):
                self._accepted.move_to_end(key)
                return verdict
        process = GrammarProcess(self._zygote)
        verdict = process.begin(syntax, text, timeout_s)
        process.close()
        if verdict.error is None:
            with self._lock:
                self._accepted[key] = verdict
                if len(self._accepted) > _MAX_ACCEPTED:
                    self._accepted.popitem(last=False)
        return verdict

    def start(self, text: str, stop_token_ids: Sequence[int] = (), salt: str = "") -> Grammar:
        """The grammar for one sequence; it is being compiled if none with this salt has had it.

        Where the grammar may end, `stop_token_ids` may end it too.
        """
        with self._lock:
            process = self._processes.get((salt, text))
            if process is None or not process.is_usable():
                process = GrammarProcess(self._zygote)
                begin = partial(process.begin, "lark", text, COMPILE_TIMEOUT_S)
                process.begun = self._run(begin)
                self._processes[salt, text] = process
            self._processes.move_to_end((salt, text))
            if len(self._processes) > _MAX_KEPT:
                self._processes.popitem(last=False)
        end_mask = self._eos_mask | token_mask(stop_token_ids, self._vocab_size)
        return Grammar(process, self._eos_mask, end_mask)

    def _run(self, work: Callable[[], Verdict]) -> "Future[Verdict]":
        """Run on a daemon thread, so that this process need not wait for it to exit."""
        future: Future[Verdict] = Future()

        def run() -> None:
            with self._compiling:
                if future.set_running_or_notify_cancel():
                    try:
                        result = work()
                    except BaseException as error:
                        future.set_exception(error)
                    else:
                        future.set_result(result)

        Thread(target=run, name="grammar", daemon=True).start()
        return future

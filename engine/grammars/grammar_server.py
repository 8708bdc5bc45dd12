"""A process that holds one grammar: it compiles it, and answers what may follow in its sequences.

llguidance is native code that reads what a client sent. A grammar can exhaust stack, memory or
time, when it is compiled and at any token later. So each grammar has a process of its own; if that
dies, only the sequences of this grammar fail. The operating system ends it: by limits on memory and
processor time, by a timer, or when the engine's end of the connection is closed.

`Zygote` starts `python -P -m outrider.engine.grammars.grammar_server CONTROL_FD`, with the token
table on stdin. That process reads no grammar itself: it always keeps one fork waiting. CONTROL_FD
sends the fork two sockets: its connection to the engine, and a lifeline. The fork dies when the
other end of the lifeline is closed.
"""

import ctypes
import faulthandler
import fcntl
import gc
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time

import msgspec
from llguidance import (
    LLExecutor,
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    TokenizerWrapper,
    regex_to_lark,
)
from llguidance.gbnf_to_lark import gbnf_to_lark

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

_STACK_BYTES = 64 << 20
_MEMORY_BYTES = 128 << 20  # beyond the stack and what the fork began with
# Processor time. A mask takes milliseconds, but the first of its kind longer: the excess comes from
# a reserve, which faster masks refill.
_MASK_S = 0.02
_RESERVE_S = 0.5
_MAX_THREADS = 8
# Allows every token whose bytes may follow, even if the tokenizer would split the text elsewhere.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class _Position:
    """A place in a text that follows the grammar."""

    def __init__(self, matcher: LLMatcher, is_over: bool = False) -> None:
        self.matcher = matcher
        self.is_over = is_over  # an id that ends the text came before it

    def copy(self) -> "_Position":
        return _Position(self.matcher.deep_copy(), self.is_over)

    def go_on(self, token_ids: list[int]) -> None:
        if not self.is_over and not self.matcher.is_error():
            num_consumed = self.matcher.try_consume_tokens(token_ids)
            self.is_over = num_consumed < len(token_ids) and not self.matcher.is_error()


class _Sequence:
    """A sequence's known tokens, and the drafts of the present step."""

    def __init__(self, start: LLMatcher) -> None:
        self._known: list[int] = []
        self.start_again(start)

    def start_again(self, start: LLMatcher) -> None:
        self.position = _Position(start.deep_copy())
        self.position.go_on(self._known)
        self._ahead: _Position | None = None
        self._drafts: list[int] = []  # before it

    def go_on(self, token_ids: list[int]) -> None:
        self._known += token_ids
        self.position.go_on(token_ids)
        self._ahead = None

    def behind(self, drafts: list[int]) -> _Position:
        """The position after these drafts. It is a copy: the drafts may be rejected, so a failure
        after them must not fail the sequence. A step must first ask with no drafts.
        """
        if not drafts:
            self._ahead = None
        if self.position.is_over or not drafts:
            return self.position
        if self._ahead is None or drafts[: len(self._drafts)] != self._drafts:
            self._ahead, self._drafts = self.position.copy(), []
        self._ahead.go_on(drafts[len(self._drafts) :])
        self._drafts = drafts
        return self._ahead


class _Follower:
    """The sequences of one grammar."""

    def __init__(self, tokenizer: LLTokenizer, limits: LLParserLimits, lark: str) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._lark = lark
        self._mask_bytes = -(-tokenizer.vocab_size // 32) * 4
        self._sequences: dict[int, _Sequence] = {}
        self._executor: LLExecutor | None = None
        self._start = self._compile()
        self._masks([self._start])  # the first is the slowest

    def _compile(self) -> LLMatcher:
        return LLMatcher(self._tokenizer, self._lark + _OPTIONS, log_level=0, limits=self._limits)

    @property
    def error(self) -> str | None:
        return _error_of(self._start)

    def answer(self, dropped: list[int], questions: list[Question]) -> list[GrammarAnswer]:
        for sequence in dropped:
            self._sequences.pop(sequence, None)
        for question in questions:
            if question.sequence not in self._sequences:
                self._sequences[question.sequence] = _Sequence(self._start)
            if question.known:
                self._sequences[question.sequence].go_on(question.known)
        answers, failed = self._answers(questions)
        if failed and self._renew():
            answers, _ = self._answers(questions)
        return answers

    def _renew(self) -> bool:
        """Compile again if the automaton is full. All sequences share it and add to it, also those
        that have ended, and also by drafts that were rejected.
        """
        probe = self._start.deep_copy()
        self._masks([probe])
        if not probe.is_error():
            return False
        self._start = self._compile()
        self._masks([self._start])
        for sequence in self._sequences.values():
            sequence.start_again(self._start)
        return True

    def _answers(self, questions: list[Question]) -> tuple[list[GrammarAnswer], bool]:
        """The answers, and whether the grammar failed in any of them."""
        answers = [GrammarAnswer() for _ in questions]
        masked: list[tuple[GrammarAnswer, LLMatcher]] = []
        for question, answer in zip(questions, answers, strict=True):
            sequence = self._sequences[question.sequence]
            if question.fits:
                copy = sequence.position.copy()
                if not copy.is_over:
                    answer.num_fitting = copy.matcher.validate_tokens(question.drafts)
            else:
                position = sequence.behind(question.drafts)
                answer.is_over = position.is_over
                if not position.is_over:
                    masked.append((answer, position.matcher))
        masks = self._masks([matcher for _, matcher in masked])
        for (answer, matcher), mask in zip(masked, masks, strict=True):
            answer.mask = bytes(self._mask_bytes) if matcher.is_error() else mask
        for question, answer in zip(questions, answers, strict=True):
            answer.error = _error_of(self._sequences[question.sequence].position.matcher)
        has_failed = any(answer.error is not None for answer in answers)
        return answers, has_failed or any(matcher.is_error() for _, matcher in masked)

    def _masks(self, matchers: list[LLMatcher]) -> list[bytes]:
        size, num_masks = self._mask_bytes, len(matchers)
        if not matchers:
            return []
        masks = ctypes.create_string_buffer(num_masks * size)
        address = ctypes.addressof(masks)
        if num_masks == 1:
            matchers[0].unsafe_compute_mask_ptr(address, size)
        else:
            if self._executor is None:
                self._executor = LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
            indexed = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(indexed, address, size, num_masks)
        return [masks.raw[i * size : (i + 1) * size] for i in range(num_masks)]


def _error_of(matcher: LLMatcher) -> str | None:
    if not matcher.is_error():
        return None
    said = re.split(r"\n<(?:non-verbose/|backtrace)>", matcher.get_error())[0]
    return "no token can go on with the text" if said == "NoExtensionBias" else said


_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _character(escape: re.Match[str]) -> str:
    """What stands for the same character, but has no leading zeros: the converter drops them."""
    digits = escape[1] or escape[2]
    if digits is None or 0xD800 <= (code := int(digits, 16)) < 0xE000:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x100 else chr(code)


def _to_lark(syntax: Syntax, text: str) -> str:
    if syntax == "gbnf":
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_character, text))
    if syntax == "regex":
        if (len(text) - len(text.rstrip("\\"))) % 2:  # the converter drops it
            raise ValueError("the regex ends with a single backslash")
        # Digits and words are ASCII, as in JSON Schema.
        return f"start: /{regex_to_lark(text, use_ascii='dw')}/"
    return text


def _serve(connection: socket.socket, tokenizer: LLTokenizer, limits: LLParserLimits) -> None:
    begin = msgspec.msgpack.decode(receive(connection), type=Begin)
    signal.setitimer(signal.ITIMER_REAL, begin.timeout_s)
    try:
        lark = _to_lark(begin.syntax, begin.text)
    except Exception as error:  # not a grammar, or nested too deeply
        send(connection, Verdict("", str(error) or type(error).__name__))
        return
    follower = _Follower(tokenizer, limits, lark)
    signal.setitimer(signal.ITIMER_REAL, 0)
    send(connection, Verdict(lark, follower.error))
    decoder = msgspec.msgpack.Decoder(Questions)
    reserve_s = _RESERVE_S
    while follower.error is None:
        asked = decoder.decode(receive(connection))
        signal.setitimer(signal.ITIMER_PROF, reserve_s + _MASK_S * len(asked.questions))
        start_s = time.process_time()
        answers = follower.answer(asked.dropped, asked.questions)
        spent_s = time.process_time() - start_s
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        reserve_s = min(left_s, _RESERVE_S)
        send(connection, Answers(answers, spent_s))


def _end_with(lifeline: socket.socket) -> None:
    """End this process, whatever it is doing, once the other end of this socket is closed.

    Nothing is ever sent to here on it. On the connection, the wake-up for a message may come after
    the message was read, and would be taken for the end.
    """
    # SIGIO ends a process on Linux. macOS ignores it: there only the limits on time end what nobody
    # waits for.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was closed before that
        os._exit(0)


def _leave_last_words(lifeline: socket.socket) -> None:
    """Have this process write to its lifeline as it dies of its own grammar, so that the engine can
    see that it was not ended from outside. Must be called on the thread that may overflow.
    """
    faulthandler.enable(lifeline.fileno(), all_threads=False)
    for number in (signal.SIGPROF, signal.SIGALRM):
        faulthandler.register(number, lifeline.fileno(), all_threads=False, chain=True)


def _live(
    connection: socket.socket,
    lifeline: socket.socket,
    tokenizer: LLTokenizer,
    limits: LLParserLimits,
) -> None:
    """Serve one grammar, on a stack of known size. Default signal handlers end the process."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            num_pages = int(statm.read().split()[5])  # private and writable
        most = num_pages * resource.getpagesize() + _STACK_BYTES + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def serve() -> None:
        try:
            _leave_last_words(lifeline)
            _serve(connection, tokenizer, limits)
        except (EOFError, OSError):
            pass  # the engine closed the connection
        except BaseException as error:  # as for lack of memory
            lifeline.send(type(error).__name__.encode())
        finally:
            os._exit(0)

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


def _fork_for(control: socket.socket, tokenizer: LLTokenizer, limits: LLParserLimits) -> bool:
    """Keep one fork waiting until it is used; False once the engine has gone."""
    taken_fd, notice_fd = os.pipe()
    if os.fork() == 0:
        os.close(taken_fd)
        data, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not data:
            os.write(notice_fd, b"x")
            os._exit(0)
        os.close(notice_fd)
        control.close()
        try:
            connection, lifeline = (socket.socket(fileno=fd) for fd in fds)
            _end_with(lifeline)
            _live(connection, lifeline, tokenizer, limits)
        finally:
            os._exit(1)
    os.close(notice_fd)
    is_last = os.read(taken_fd, 1)
    os.close(taken_fd)
    return not is_last


class _Tokens:
    """A token table as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, table: Table) -> None:
        self.tokens = table.tokens
        self.special_token_ids = table.special_token_ids
        self.eos_token_id = table.eos_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("only forced tokens would need this, and they are off")


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    table = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Table)
    tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(table)), eos_token=table.eos_token_ids)
    limits = LLParserLimits(
        max_lexer_states=table.max_lexer_states,
        step_max_items=table.max_step_items,
        max_items_in_row=table.max_step_items,
        verbose_errors=False,
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave no zombies
    gc.freeze()
    while _fork_for(control, tokenizer, limits):
        pass


if __name__ == "__main__":
    main()

"""A grammar may cost its own process everything, and nobody else anything."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grammars
import psutil
import pytest
from ended_processes import has_ended
from grammars import allowed, compile_grammar

from outrider.engine.config import TokenTable
from outrider.engine.grammars import grammar_messages, grammar_process
from outrider.engine.grammars.grammar_compiler import GrammarCompiler

A, B, X, MANY_A, EOS = range(5)
TOKENS = TokenTable(token_bytes=(b"a", b"b", b"x", b"a" * 60, b"<eos>"), special_token_ids=(EOS,))
GOOD = 'start: "a" "b"'


def make() -> GrammarCompiler:
    return GrammarCompiler(TOKENS, (EOS,), len(TOKENS.token_bytes))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make()


def chain(num_rules: int) -> str:
    """Rules that lead to each other; compiling them recurses once for each."""
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(num_rules))
    return f'start: r0\n{rules}r{num_rules}: "a"'


# Takes a minute to be found too large.
SLOW = "start: T0\n" + "".join(f'T{i}: T{i + 1} "b"?\n' for i in range(3000)) + 'T3000: "a"'
# Each token can be read in ever more ways.
AMBIGUOUS = 'start: "x" e\ne: e e e | e e | "a" | "a" e "a" | e "b" | "b" e |'


def forks(compiler: GrammarCompiler) -> set[int]:
    """Processes of grammars, and the one that waits for the next."""
    assert compiler._zygote.process is not None
    zygote = psutil.Process(compiler._zygote.process.pid)
    return {child.pid for child in zygote.children()}


def becomes_true(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_recursion_without_end_ends_its_own_process(compiler: GrammarCompiler) -> None:
    bystander = compile_grammar(compiler, GOOD)
    grammar = compile_grammar(compiler, chain(100_000))
    assert "nests too deeply" in (grammar.error or "")
    assert allowed(grammar) == set()
    assert A in allowed(bystander)
    bystander.follow([A])
    assert allowed(bystander) == {B}


def test_three_thousand_rules_are_no_trouble(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, chain(3000))
    assert allowed(grammar) == {A}


def test_what_takes_too_long_is_ended(compiler: GrammarCompiler) -> None:
    compile_grammar(compiler, GOOD)
    verdict = compiler.check("lark", SLOW, 0.1).result()
    assert verdict.timed_out
    assert "longer than 0.1 s" in (verdict.error or "")
    becomes_true(lambda: len(forks(compiler)) <= 1 + len(compiler._processes))


def test_memory_is_bounded(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, "start: " + " | ".join(f'"{i}a" b' for i in range(400_000)))
    assert grammar.error is not None
    assert allowed(compile_grammar(compiler, GOOD)) == {A}


def test_a_grammar_that_explodes_later_fails_alone(compiler: GrammarCompiler) -> None:
    grammar, bystander = (compile_grammar(compiler, text) for text in (AMBIGUOUS, GOOD))
    assert allowed(grammar) == {X}
    grammar.follow([X])
    for _ in range(20):
        if MANY_A not in allowed(grammar):
            break
        grammar.follow([MANY_A])
    assert grammar.is_at_fault
    assert A in allowed(bystander)


def test_a_process_that_is_killed_ends_its_sequences_and_no_others() -> None:
    compiler = make()
    grammar, bystander = (
        compile_grammar(compiler, 'start: "a" "b"*'),
        compile_grammar(compiler, GOOD),
    )
    assert A in allowed(bystander)
    before = forks(compiler)
    process = grammar.process
    process.close()
    becomes_true(lambda: forks(compiler) < before)
    grammar.follow([A])
    assert allowed(grammar) == set()
    assert grammar.error is not None
    bystander.follow([A])
    assert allowed(bystander) == {B}
    assert allowed(compile_grammar(compiler, 'start: "a" "b"*')) == {A}  # in another process


def test_the_process_that_they_are_forked_from_may_die() -> None:
    compiler = make()
    bystander = compile_grammar(compiler, GOOD)
    assert compiler._zygote.process is not None
    killed = compiler._zygote.process.pid
    os.kill(killed, signal.SIGKILL)
    becomes_true(lambda: has_ended(killed))
    for i in range(3):
        assert allowed(compile_grammar(compiler, 'start: "b"' + " " * i)) == {B}
    assert compiler._zygote.process.pid != killed
    assert has_ended(killed)
    bystander.follow([A])
    assert allowed(bystander) == {B}


def test_giving_up_ends_the_compilation() -> None:
    compiler = make()
    compile_grammar(compiler, GOOD)
    first, second = compiler.start(SLOW), compiler.start(SLOW)
    assert first.process is second.process
    process = first.process
    becomes_true(lambda: process._connection is not None)
    becomes_true(lambda: len(forks(compiler)) > 2)
    first.leave()
    assert process.is_usable()  # the second waits for it still
    second.leave()
    process.begun.result(timeout=5)  # not the ten seconds that it may take
    becomes_true(lambda: len(forks(compiler)) == 2, within_s=5)
    assert not process.is_usable()
    third = compiler.start(SLOW)
    assert third.process is not process
    third.leave()


def test_a_process_that_runs_only_after_all_gave_up_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = make()
    compiler.warm_up()
    becomes_true(lambda: len(forks(compiler)) == 1)
    (waiting,) = forks(compiler)
    has_asked = threading.Event()

    def receive(connection: socket.socket) -> bytes:
        has_asked.set()
        return grammar_messages.receive(connection)

    monkeypatch.setattr(grammar_process, "receive", receive)
    os.kill(waiting, signal.SIGSTOP)
    grammar = compiler.start(SLOW)
    assert has_asked.wait(20)
    grammar.leave()
    grammar.process.begun.result(timeout=5)
    os.kill(waiting, signal.SIGCONT)
    becomes_true(lambda: has_ended(waiting), within_s=5)  # not the ten seconds that it may take


def test_nothing_is_left_of_what_was_used() -> None:
    me = psutil.Process()
    compile_grammar(compiler := make(), GOOD)
    del compiler
    gc.collect()
    num_fds, children = me.num_fds(), len(me.children(recursive=True))
    compiler = make()
    for i in range(20):
        allowed(compile_grammar(compiler, GOOD + " " * i))
        compiler.check("lark", f"start: nobody{i}", 5.0).result()
    assert len(compiler._processes) < 20
    del compiler
    gc.collect()
    becomes_true(lambda: me.num_fds() <= num_fds)
    becomes_true(lambda: len(me.children(recursive=True)) <= children)


def test_all_of_them_die_with_their_owner() -> None:
    support = str(Path(grammars.__file__).parent)
    script = f"""
import sys, time
sys.path.append({support!r})
import psutil
from grammars import compile_grammar
from outrider.engine.config import TokenTable
from outrider.engine.grammars.grammar_compiler import GrammarCompiler

table = TokenTable(token_bytes=(b"a", b"b", b"x", b"<eos>"), special_token_ids=(3,))
compiler = GrammarCompiler(table, (3,), 4)
compile_grammar(compiler, {GOOD!r})
compiler.start({SLOW!r})
while len(psutil.Process().children(recursive=True)) < 4:
    time.sleep(0.01)
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) >= 4
        owner.kill()
    for pid in pids:
        becomes_true(lambda pid=pid: has_ended(pid))  # type: ignore[misc]

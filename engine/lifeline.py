"""How a child process ends: together with its parent, and in which words."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

MOST_WORDS = 4096  # bytes that a child may leave
_lifeline_fd: int | None = None  # a socket to the parent, in a child


def describe_exit(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return f"killed by signal {signal.SIGKILL}, as a rule because memory has run out"
    if exit_code < 0:
        return f"killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"it left with exit code {exit_code}"


def leave_with_parent(meanwhile: Callable[[], object] = lambda: None) -> bytes:
    """Called first in the child: from then on it ends together with the parent, however that ends
    and whatever the child is doing. Returns the line from the parent, after calling `meanwhile`.
    """
    global _lifeline_fd
    # Nothing in this process may read from the lifeline, or pass it on to a child.
    _lifeline_fd = lifeline_fd = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if sys.platform == "linux":
        # The thread below needs the GIL to act; the kernel does not. For the kernel, the parent is
        # the thread that started us: that of the parent's event loop, which must live as long.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    meanwhile()
    line = bytearray()
    while not line.endswith(b"\n") and (part := os.read(lifeline_fd, 65536)):
        line += part

    def watch() -> None:
        while os.read(lifeline_fd, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    return bytes(line)


def leave(exit_code: int) -> NoReturn:
    """End this process as Python would, but keep its modules until then: to free those that torch
    and transformers import takes seconds, in which the parent waits, and its clients.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def leave_at_once(reason: str) -> NoReturn:
    """End this process from any thread, whatever the others wait for; its parent gets the reason,
    if it listens (`ChildProcess`).
    """
    if _lifeline_fd is not None:
        with contextlib.suppress(OSError):
            os.write(_lifeline_fd, reason.encode()[:MOST_WORDS])
    os._exit(1)

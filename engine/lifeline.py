"""How a child process ends: together with its parent, and in which words."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable


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
    # Nothing in this process may read from the lifeline, or pass it on to a child.
    lifeline_fd = os.dup(0)
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

"""Followers forked from the process of a test, which has imported torch and transformers."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from outrider.engine.ranks import follower, followers


class Forked:
    """What `Followers` needs of a Popen."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        read_fd, write_fd = os.pipe()
        fd, _ = pass_fds
        self.pid = os.fork()
        if self.pid == 0:
            os.close(write_fd)
            os.dup2(read_fd, 0)
            sys.argv = [*command[-2:-1], str(fd)]
            try:
                follower.main()
            finally:
                os._exit(1)
        os.close(read_fd)
        self.stdin = os.fdopen(write_fd, "wb")
        self._exit_code: int | None = None

    def kill(self) -> None:
        if self._exit_code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._exit_code is None:
            try:
                _, status = os.waitpid(self.pid, 0)
            except ChildProcessError:  # another thread has waited for it
                return self._exit_code if self._exit_code is not None else 0
            self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code


@contextmanager
def forked() -> Iterator[None]:
    """Inside, followers are forked."""
    with patch.object(followers.subprocess, "Popen", Forked):
        yield

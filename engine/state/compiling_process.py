"""The process that compiles kernels for an engine, into Triton's cache on disk.

On its standard input come kernels, and None where the engine begins to wait; for each kernel it
writes a byte. Each is compiled in a fork, which needs no imports, and may die. None touches the
GPU. They come pickled: in JSON, which Triton can make of them, named tuples lose their names.
"""

import importlib
import json
import os
import pickle
import sys
from contextlib import suppress
from typing import Any

COMPILED, WAS_COMPILED, FAILED = b"c", b"w", b"f"


def main() -> None:
    answers_fd = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    device = _Device(**json.loads(sys.argv[1]))
    running: set[int] = set()
    most = len(os.sched_getaffinity(0))

    def answer(*, waits: bool) -> bool:
        """Answer for a kernel that has ended, if there is any."""
        pid, status = os.waitpid(-1, 0 if waits else os.WNOHANG) if running else (0, 0)
        if pid == 0:
            return False
        running.discard(pid)
        ending = os.waitstatus_to_exitcode(status)
        os.write(answers_fd, {0: COMPILED, 1: WAS_COMPILED}.get(ending, FAILED))
        return True

    with suppress(EOFError):
        while True:
            kernel = pickle.load(sys.stdin.buffer)
            while answer(waits=kernel is None or len(running) == most):
                pass
            if kernel is not None:
                pid = os.fork()
                if pid == 0:
                    _compile_and_exit(device, *kernel)
                running.add(pid)


class _Device:
    """Stands in for Triton's driver."""

    def __init__(self, target: dict[str, Any], launcher: list[str]) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        self._target = GPUTarget(**target)
        self.launcher_cls = getattr(importlib.import_module(launcher[0]), launcher[1])
        driver.set_active(self)
        triton_key()  # hashes Triton's files, so that no fork has to

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def _compile_and_exit(
    device: _Device, module: str, name: str, source: tuple[Any, Any, Any], options: dict[str, Any]
) -> None:
    ending = 2
    try:
        from triton import compile, knobs
        from triton.compiler import ASTSource

        hits: list[bool] = []
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        kernel = ASTSource(getattr(importlib.import_module(module), name), *source)
        compiled = compile(kernel, device.get_current_target(), options)
        ending = int(all(hits))
        # Triton 3.6 has a C compiler make a launcher for each signature.
        device.launcher_cls(kernel, compiled.metadata)
    finally:
        os._exit(ending)


if __name__ == "__main__":
    main()

"""Compiles kernels in parallel before they are launched.

Triton compiles a kernel when it is first launched, one after another, and much of that holds
Python's lock. So a call is first run without launching what is not compiled yet: other processes
compile that meanwhile, into Triton's cache on disk.
"""

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.kernels.triton_or_none import triton

from ..api import ReportProgress
from .compiling_process import WAS_COMPILED

log = logging.getLogger(__name__)

_ENOUGH = 4  # kernels that must have been in the cache, until a call is taken to find all there


@contextmanager
def compiling_ahead(device: torch.device, report: ReportProgress) -> Iterator[None]:
    """Meanwhile `compile_ahead` compiles for this device; on a CPU there is nothing to compile."""
    global _compilers
    if device.type == "cpu":
        yield
        return
    try:
        with torch.cuda.device(device):
            _compilers = Compilers(report)
    except Exception:  # then kernels are compiled as they are launched
        log.debug("no kernel is compiled ahead", exc_info=True)
    try:
        yield
    finally:
        if _compilers is not None:
            _compilers.close()
        _compilers = None


def compile_ahead(call: Callable[[], object]) -> None:
    """Compile what `call` will launch; what it does now, or raises, must not matter.

    It runs on zeros in place of what kernels would have written.
    """
    if _compilers is not None:
        _compilers.compile(call)


class Compilers:
    """A process that compiles kernels, as many at once as there are cores."""

    def __init__(self, report: ReportProgress) -> None:
        """For the GPU that is current. Raises an error if Triton cannot do this."""
        driver = triton.runtime.driver.active
        launcher = driver.launcher_cls
        setup = {
            "target": vars(driver.get_current_target()),
            "launcher": [launcher.__module__, launcher.__qualname__],
        }
        self._knobs = triton.knobs.runtime
        self._report = report
        self._asked: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROCESS, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # an interrupt reaches this process alone, which closes it
        )

    def close(self) -> None:
        """End the process; a kernel that it is compiling is finished."""
        self._process.kill()
        self._process.communicate()

    @torch.inference_mode()
    def compile(self, call: Callable[[], object]) -> None:
        """As `compile_ahead`."""
        num_asked, answers = 0, b""
        skipped: list[tuple[dict[str, object], str]] = []

        def hook(*, fn: Any, compile: Any, **_: object) -> bool:
            nonlocal num_asked, answers
            kernels = fn.jit_function.device_caches[compile["device"]][0]
            kernels[compile["key"]] = _Skipped
            skipped.append((kernels, compile["key"]))
            data = compile["specialization_data"]
            if data not in self._asked:
                self._asked.add(data)
                options = json.loads(data)["options"]  # JSON has lists for tuples
                options = {k: tuple(v) if type(v) is list else v for k, v in options.items()}
                source = (compile["signature"], compile["constants"], compile["configs"][0])
                self._send((fn.module, fn.name, source, options))
                num_asked += 1
                answers += self._read(waits=False)
                if answers[:_ENOUGH] == WAS_COMPILED * _ENOUGH:
                    raise _AllCompiled
            return True  # neither compile it here nor launch it

        saved, self._knobs.jit_cache_hook = self._knobs.jit_cache_hook, hook
        try:
            with _Zeros():  # type: ignore[no-untyped-call]
                call()
        except Exception:
            log.debug("not all kernels are compiled ahead", exc_info=True)
        finally:
            self._knobs.jit_cache_hook = saved
            for kernels, key in skipped:
                del kernels[key]
        self._send(None)
        while len(answers) < num_asked:
            self._report("compiling kernels", len(answers), num_asked)
            if not (more := self._read(waits=True)):
                return  # it died
            answers += more

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(pickle.dumps(message))

    def _read(self, *, waits: bool) -> bytes:
        """Answers of one byte each; none if the process has ended."""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), waits)
        return self._process.stdout.read(4096) or b""


class _Skipped:
    """A kernel that does nothing when it is launched."""

    function = packed_metadata = None

    @staticmethod
    def launch_metadata(*_: object) -> None: ...

    @staticmethod
    def run(*_: object) -> None: ...


class _AllCompiled(Exception):
    """The kernels asked for so far were in Triton's cache; so the others are taken to be, too."""


class _Zeros(TorchDispatchMode):
    """New tensors hold zeros: what no kernel has written may be an index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _UNFILLED else made


_compilers: Compilers | None = None
_PROCESS = "outrider.engine.state.compiling_process"
_aten = torch.ops.aten
_UNFILLED = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}

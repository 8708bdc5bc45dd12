"""The variants of a kernel that Triton compiles, known without a GPU.

It compiles one for every combination of dtypes, constants and options; of integers that are 1 or a
multiple of 16; and of pointers to a multiple of 16 bytes. So a request may wait for a kernel that
another has used.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction


class Variants:
    """Those that launches take under Triton's interpreter."""

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.late: set[str] = set()  # launched without having been compiled

    @contextmanager
    def watched(self) -> Iterator[None]:
        run = InterpretedFunction.run

        def launch(kernel: Any, *args: Any, **options: Any) -> None:
            self.late |= {_variant(kernel, args, options)} - self.compiled
            run(kernel, *args, **options)

        with patch.object(InterpretedFunction, "run", launch):
            yield

    @contextmanager
    def only_compiled(self) -> Iterator[None]:
        """Inside, nothing is launched."""

        def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
            self.compiled.add(_variant(kernel, args, options))

        with patch.object(InterpretedFunction, "run", compile_only):
            yield


def _variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    others = options.keys() - named.keys() - {"grid", "warmup"}
    given = inspect.signature(kernel.fn).bind(*args, **named)
    alike = kernel.kwargs["do_not_specialize"] or ()
    kinds = {
        name: value
        if "constexpr" in str(kernel.fn.__annotations__.get(name))
        else native_specialize_impl(BaseBackend, value, False, name not in alike, True)
        for name, value in given.arguments.items()
    }
    return f"{kernel.fn.__name__} {kinds} {[(name, options[name]) for name in sorted(others)]}"

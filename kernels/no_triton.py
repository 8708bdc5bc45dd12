"""Replaces the parts of Triton that the host's side of kernels uses, if Triton is missing."""

from collections.abc import Callable
from typing import Any, NoReturn


class _NoKernel:
    """Stands for a compiled kernel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__name__

    def __getitem__(self, grid: object) -> "_NoKernel":
        return self

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"the kernel {self._name} needs Triton, and a GPU")


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _NoKernel if function is None else _NoKernel(function)


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@jit
def gdc_launch_dependents() -> None: ...


@jit
def gdc_wait() -> None: ...


AsyncCompileMode = TensorDescriptor = object


class _Constant:
    """Stands for `tl.constexpr`, whose value the host may read."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Language:
    """Stands for `triton.language`: the names in annotations and constants."""

    constexpr = _Constant

    def __getattr__(self, name: str) -> str:
        return name


language = _Language()

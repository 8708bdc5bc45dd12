"""Compiles what host functions launch for a GPU that is not there, and reads the result."""

import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from outrider.kernels._dispatch import INTERPRET

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
MARKS = [
    pytest.mark.skipif(INTERPRET or not DISASSEMBLER.exists(), reason="needs Triton's compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would forget what graphs use"),
]


class Gpu(NamedTuple):
    """What kernels and their launches depend on."""

    capability: tuple[int, int]
    shared_bytes: int  # that a program may take
    num_sms: int


A100 = Gpu((8, 0), 166_912, 108)
RTX_3090 = Gpu((8, 6), 101_376, 82)
RTX_4090 = Gpu((8, 9), 101_376, 128)
H100 = Gpu((9, 0), 232_448, 132)
B200 = Gpu((10, 0), 232_448, 148)
RTX_5090 = Gpu((12, 0), 101_376, 170)


@contextmanager
def launches(gpu: Gpu) -> Iterator[list[Any]]:
    """Inside, tensors are made up, and launches compile only. Gives the compiled kernels."""
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        def mock(value: Any) -> Any:
            return MockTensor(value.dtype, [1]) if isinstance(value, torch.Tensor) else value

        options = {name: mock(value) for name, value in options.items()}
        kernel = run(self, *map(mock, args), grid=grid, warmup=True, **options)
        found.append(kernel)

    with _made_up(gpu, compile_only):
        yield found


@contextmanager
def names_of_launches(gpu: Gpu) -> Iterator[list[str]]:
    """Inside, tensors are made up, and nothing runs. Gives the names of the kernels that would be
    launched, those of torch's operators among them.
    """
    found: list[str] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.overloadpacket.__name__
            if func.namespace == "aten" and not func.is_view and "empty" not in name:
                found.append(name)
            return func(*args, **(kwargs or {}))

    def note(self: Any, *args: Any, **options: Any) -> None:
        found.append(self.fn.__name__)

    with _made_up(gpu, note), Operators():
        yield found


@contextmanager
def grids_of_launches(gpu: Gpu) -> Iterator[list[tuple[str, Any]]]:
    """Inside, tensors are made up, and nothing runs. Gives name and grid of each of Triton's
    kernels that would be launched.
    """
    found: list[tuple[str, Any]] = []

    def note(self: Any, *args: Any, grid: Any, **options: Any) -> None:
        found.append((self.fn.__name__, grid))

    with _made_up(gpu, note):
        yield found


@contextmanager
def _made_up(gpu: Gpu, run: Callable[..., None]) -> Iterator[None]:
    """Inside, tensors are of this GPU, and have no memory; `run` takes the launches of Triton's."""
    major, minor = gpu.capability
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: gpu,  # no other has its kernels
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": gpu.shared_bytes}
        ),
    )

    _forget()
    with (
        patch.object(driver, "_active", target),
        patch.object(JITFunction, "run", run),
        patch.object(torch.cuda, "get_device_capability", lambda device: gpu.capability),
        patch.object(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(multi_processor_count=gpu.num_sms),
        ),
        patch.object(torch.Tensor, "__getitem__", _part),
        FakeTensorMode(),
    ):
        yield
    _forget()


def _part(x: torch.Tensor, index: Any) -> torch.Tensor:
    """x[index], by operators: torch's own indexing looks for the GPU first."""
    dim = 0
    for one in index if isinstance(index, tuple) else (index,):
        if one is None:
            x = x.unsqueeze(dim)
        elif isinstance(one, slice):
            first, end, step = one.indices(x.shape[dim])
            assert step == 1
            x = x.narrow(dim, first, end - first)
        else:
            x = x.select(dim, one)
            continue
        dim += 1
    return x


def _forget() -> None:
    """Drop what kernels keep of a device: its properties, and tensors, which are made up here."""
    for name, module in list(sys.modules.items()):
        if name.startswith("outrider.kernels."):
            for value in vars(module).values():
                # A stand-in for Triton's language, once imported, has every name.
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


def disassembled(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [DISASSEMBLER, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_products(kernels: list[Any]) -> None:
    """They multiply on tensor cores, and overwrite no factor that is still multiplied."""
    assert kernels
    for kernel in kernels:
        num_products, early = overwritten_factors(disassembled(kernel))
        assert num_products > 0
        assert early == []


def overwritten_factors(code: str) -> tuple[int, list[str]]:
    """How many wgmmas of loops take a factor from registers, and what writes one too early.

    A wgmma reads its registers until the program waits for it, maybe in the next turn of a loop.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif match := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@\S+ )?(.*?) *;", line):
            instructions.append(match[1])
            if jump := re.match(r"BRA `\((\.L_\w+)\)", match[1]):
                loops += [(labels[jump[1]], len(instructions))] if jump[1] in labels else []
    num_products, early = 0, []
    for first, end in loops:
        body = instructions[first:end]
        products = [line for line in body if re.match(r"HGMMA\S* R\d+, R\d", line)]
        num_products += len(products)
        under_way: deque[set[int]] = deque()
        for line in body + body:
            if line in products:
                factor = int(line.split(", R")[1].split(",")[0].removesuffix(".reuse"))
                under_way.append(set(range(factor, factor + 4)))
            elif line.startswith("WARPGROUP.DEPBAR"):
                while len(under_way) > int(line.split()[-1], 16):
                    under_way.popleft()
            elif any(registers & _written(line) for registers in under_way):
                early.append(line)
    return num_products, early


def _written(instruction: str) -> set[int]:
    match = re.match(r"(\S+) R(\d+)", instruction)
    if match is None:
        return set()
    four, two = re.search(r"\.128|\.M88\.4", match[1]), re.search(r"\.64$|WIDE|^CS2R$", match[1])
    first = int(match[2])
    return set(range(first, first + (4 if four else 2 if two else 1)))

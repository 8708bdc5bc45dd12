"""Runs kernels that are written in Gluon in plain torch: Triton interprets none.

Its warpgroups take turns, in an order drawn by a seed. What is asynchronous on a GPU takes its
time: a copy fills its part of shared memory when the scheduler draws it, and until then there is
NaN; what a product reads must be there from its start until it is waited for. Copies by the warps
themselves come no sooner than these wait for them. So a stage that is read or filled too early
shows, and warps that wait for ever are an error.
"""

import itertools
import math
import random
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import dependent_launch
from outrider.kernels.model import (
    attention_blocks,
    attention_parts,
    block_scaled_experts,
    block_scaled_few_rows,
    block_scaled_product,
    e2m1,
    few_rows_attention,
    few_rows_codes,
    few_rows_experts,
    many_rows_product,
    many_rows_tiles,
    mxfp4_few_rows,
    narrow_numbers,
    prompt_attention,
    rms_norm,
    row_codes,
    row_scaled_few_rows,
    row_scaled_product,
    silu_mul,
    softmax_sums,
    state_warpgroups,
    tiles,
    warpgroups,
)
from outrider.kernels.model.narrow_matrix import RowFormat

# Kernels, each with what it is made of, as it is before a test puts something in its place.
_MODULES = {
    name: [dict(vars(module)) for module in (*others, warpgroups, own)]
    for name, own, *others in (
        (
            "_prompt_attention_kernel",
            prompt_attention,
            softmax_sums,
            attention_blocks,
            dependent_launch,
        ),
        (
            "_few_rows_attention_kernel",
            few_rows_attention,
            softmax_sums,
            attention_blocks,
            dependent_launch,
        ),
        ("_merge_parts_kernel", attention_parts, softmax_sums, attention_blocks, dependent_launch),
        ("_block_scaled_kernel", block_scaled_product, many_rows_tiles, silu_mul, tiles),
        ("_row_scaled_kernel", row_scaled_product, many_rows_tiles, silu_mul, tiles),
        (
            "_row_scaled_few_rows_kernel",
            row_scaled_few_rows,
            few_rows_codes,
            silu_mul,
            dependent_launch,
        ),
        ("_experts_kernel", block_scaled_experts, block_scaled_product, many_rows_tiles, silu_mul),
        (
            "_block_scaled_few_rows_kernel",
            block_scaled_few_rows,
            few_rows_codes,
            silu_mul,
            dependent_launch,
        ),
        ("_cell_by_cell_kernel", state_warpgroups),
        ("_many_rows_kernel", many_rows_product, many_rows_tiles, rms_norm, silu_mul, tiles),
        ("_few_rows_of_plain_experts_kernel", few_rows_experts, silu_mul, dependent_launch),
        ("_few_rows_of_experts_kernel", mxfp4_few_rows, narrow_numbers, silu_mul, dependent_launch),
    )
}


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # numbers by their bytes
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


class DeadlockError(AssertionError):
    """All warps wait."""


class Pointer:
    """Into a tensor, in its elements."""

    def __init__(self, flat: Tensor, at: Any = 0) -> None:
        self._flat, self._at = flat, at
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self._flat, self._at + more)

    def to(self, dtype: torch.dtype) -> "Pointer":
        """To numbers of another size in the same place."""
        size, other = self._flat.element_size(), dtype.itemsize
        return Pointer(self._flat.view(dtype), self._at * size // other)

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        at = torch.as_tensor(self._at)
        if mask is None:
            return self._flat[at.long()]
        mask = torch.as_tensor(mask).expand(torch.broadcast_shapes(at.shape, _shape(mask)))
        found = self._flat[torch.where(mask, at, 0).long()]
        return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))

    def store(self, value: Tensor, mask: Any = None) -> None:
        mask = torch.as_tensor(True if mask is None else mask).expand(value.shape)
        self._flat[torch.as_tensor(self._at).expand(value.shape)[mask]] = value[mask]


def _shape(x: Any) -> torch.Size:
    return torch.as_tensor(x).shape


class Shared:
    """Shared memory, whose tiles are stored some columns at a time."""

    def __init__(self, memory: Tensor, shape: tuple[int, ...], is_turned: bool = False) -> None:
        self.memory, self.shape, self._is_turned = memory, shape, is_turned
        self.dtype = SimpleNamespace(
            element_ty=memory.dtype, primitive_bitwidth=8 * memory.element_size()
        )

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < self.shape[0]
        return Shared(self.memory[int(i)], self.shape[1:])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        """Of a tile that lies as a whole."""
        assert self.memory.shape == self.shape
        memory = self.memory.narrow(dim, start, length)
        return Shared(memory, tuple(memory.shape))

    def permute(self, order: tuple[int, int]) -> "Shared":
        assert order == (1, 0)
        return Shared(self.memory, self.shape[::-1], not self._is_turned)

    def load(self, layout: object = None) -> Tensor:
        rows = self.shape[::-1] if self._is_turned else self.shape
        loaded = self.memory.reshape(rows).clone()
        return loaded.T if self._is_turned else loaded

    def store(self, value: Tensor) -> None:
        assert value.shape == self.shape
        self.memory.copy_(value.reshape(self.memory.shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> "Shared":
        """Parts of some rows and columns as whole tiles, whose columns lie behind each other."""
        if dtype != self.memory.dtype or len(shape) == 2 or shape[-1] == self.shape[-1]:
            size = math.prod(shape) * dtype.itemsize
            memory = self.memory.view(-1).view(torch.uint8)[:size].view(dtype)
            return Shared(memory.view(shape), tuple(shape))
        num, rows, columns = shape
        span = self.shape[2]
        memory = self.memory.view(num, columns // span, rows, span).transpose(1, 2)
        return Shared(memory, (num, rows, columns))


class Barrier:
    """Opens once so many have arrived and all bytes that are expected have come."""

    def __init__(self) -> None:
        self.count = self.left = self.num_bytes = self.phase = 0

    def changed(self) -> None:
        assert self.left >= 0, "more arrivals than a barrier waits for"
        if self.left == 0 and self.num_bytes == 0:
            self.left, self.phase = self.count, self.phase + 1


class Product:
    """Of a warpgroup, until it waits for it."""

    def __init__(self, left: Any, right: Shared, acc: Any) -> None:
        self._factors, self._acc = (left, right), acc
        self._before = self._read()
        self._result: Tensor | None = None

    def _read(self) -> list[Tensor]:
        return [x.load() if isinstance(x, Shared) else x for x in self._factors]

    def result(self) -> Tensor:
        if self._result is None:
            left, right = self._read()
            for before, now in zip(self._before, (left, right), strict=True):
                is_same = torch.equal(_bytes(before), _bytes(now))
                assert is_same, "shared memory changes while it is multiplied"
            acc = self._acc.result() if isinstance(self._acc, Product) else self._acc
            # In float64 numbers of 8 bits are added exactly, in any order of the library's.
            self._result = (acc + left.double() @ right.double()).float()
        return self._result


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class Warps(threading.Thread):
    """Some warps of a program, which run alone until they wait."""

    def __init__(
        self, program: "Program", function: Callable[..., Any], args: Any, num_warps: int
    ) -> None:
        super().__init__(daemon=True)
        self.num_threads = 32 * num_warps
        self._program, self._function, self._args = program, function, args
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.products: list[Product] = []
        self.copies: list[list[tuple[Shared, Tensor]]] = [[]]  # by group, the last still open
        self.num_stores = 0  # that are under way
        self.is_done = False

    @torch.inference_mode()
    def run(self) -> None:
        self.turn.acquire()
        try:
            if self._program.error is None:
                self._function(*self._args)
        except BaseException as error:
            self._program.error = error
        self.is_done = True
        self._program.turn.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self._program.turn.release()
        self.turn.acquire()
        if self._program.error is not None:
            raise self._program.error


class Program:
    """One program: its warps take turns."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], seed: int) -> None:
        self.place, self.grid, self._random = place, grid, random.Random(seed)
        self.turn = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.copies: list[Callable[[], None]] = []

    def warp_specialize(self, functions: list[Any], num_warps: Any = (), *_: Any) -> None:
        warps = [
            Warps(self, function, args, num)
            for (function, args), num in zip(functions, (4, *num_warps), strict=True)
        ]
        for each in warps:
            each.start()
        while not all(each.is_done for each in warps):
            able: list[Any] = [w for w in warps if not w.is_done and w.ready()]
            able += self.copies
            if not able:
                self.error = DeadlockError("all warps wait")
            if self.error is not None:
                able = [w for w in warps if not w.is_done]
                if not able:
                    break
            chosen = self._random.choice(able)
            if isinstance(chosen, Warps):
                chosen.turn.release()
                self.turn.acquire()
            else:
                self.copies.remove(chosen)
                chosen()
        if self.error is not None:
            raise self.error
        assert not self.copies, "copies that nobody waits for"


class Kernel:
    """In place of a kernel; by default that of prompts. `num_programs`: in place of its grid."""

    def __init__(
        self, num_programs: int | None = None, seed: int = 0, name: str = "_prompt_attention_kernel"
    ) -> None:
        self._num_programs, self._seed, self._name = num_programs, seed, name
        self.num_launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if self._num_programs is not None:
            grid = (self._num_programs,)

        def launch(*args: Any, num_warps: int, maxnreg: int = 0, **constants: Any) -> None:
            self.num_launches += 1
            constants.pop("enable_fp_fusion", None)
            if "DTYPE" in constants:
                constants["DTYPE"] = getattr(
                    torch, _TORCH_NAMES.get(str(constants["DTYPE"]), ""), None
                )
            given = [Pointer(_flat(x)) if isinstance(x, Tensor) else x for x in args]
            for i, place in enumerate(itertools.product(*map(range, grid))):
                program = Program(place, grid, self._seed + i)
                run = partial(_interpreted(program, self._name)[self._name], **constants)
                if "warp_specialize" in run.func.__code__.co_names:
                    run(*given)
                else:
                    program.warp_specialize([(run, given)])

        return launch


def _flat(x: Tensor) -> Tensor:
    """From its first element to the end of its storage."""
    size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return torch.as_strided(x, (size,), (1,))


def _interpreted(program: Program, kernel: str) -> dict[str, Any]:
    """The functions of a kernel, over stand-ins for Gluon's."""
    gl = _language(program)
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=_init,
        wait=lambda barrier, phase: _of_warps().wait(lambda: barrier.phase % 2 != int(phase)),
        arrive=_arrive_of_warps,
        expect=_expect,
    )

    def copy(cache: Any, at: list[Any], barrier: Barrier, part: Shared) -> None:
        assert cache.block_shape == list(part.shape)
        first = [int(each) for each in at]
        source = torch.as_strided(cache.base, tuple(cache.shape), tuple(cache.strides))
        source = source[tuple(map(slice, first, map(sum, zip(first, part.shape, strict=True))))]
        # Behind the end there are zeros.
        missing = [a - b for a, b in zip(part.shape, source.shape, strict=True)]
        ends = [end for num in reversed(missing) for end in (0, num)]
        source = F.pad(source.view(_WHOLE[source.itemsize]), ends).view(source.dtype)
        is_whole = not source.is_floating_point()
        part.store(torch.full(part.shape, 255 if is_whole else torch.nan).to(source.dtype))

        def arrive() -> None:
            part.store(source)
            barrier.num_bytes -= source.numel() * source.element_size()
            barrier.changed()

        program.copies.append(arrive)

    def store(out: Any, at: list[Any], part: Shared) -> None:
        assert out.block_shape == list(part.shape)
        first, warps, value = [int(each) for each in at], _of_warps(), part.load()
        warps.num_stores += 1

        def arrive() -> None:
            is_same = torch.equal(_bytes(value), _bytes(part.load()))
            assert is_same, "shared memory changes while it is stored"
            place = out.base[
                tuple(map(slice, first, map(sum, zip(first, part.shape, strict=True))))
            ]
            place.copy_(value[tuple(map(slice, place.shape))])  # nothing behind the end
            warps.num_stores -= 1

        program.copies.append(arrive)

    def wait_for_stores(num_left: int) -> None:
        warps = _of_warps()
        warps.wait(lambda: warps.num_stores <= num_left)

    def arrive_after_copies(barrier: Barrier, *, increment_count: bool) -> None:
        assert not increment_count
        warps = _of_warps()
        parts, warps.copies[-1] = warps.copies[-1], []

        def arrive() -> None:
            for part, source in parts:
                part.store(source)
            _arrive(barrier, warps.num_threads)

        program.copies.append(arrive)

    copies = SimpleNamespace(
        async_copy_global_to_shared=_copy,
        commit_group=_commit,
        wait_group=_wait_for_copies,
        mbarrier_arrive=arrive_after_copies,
    )
    hopper = SimpleNamespace(
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_wait,
        mma_v2=lambda left, right, acc: (acc + left.double() @ right.double()).float(),
        fence_async_shared=lambda: None,
    )
    names: dict[str, Any] = {
        "gl": gl,
        "tl": gl,
        "hopper": hopper,
        "mbarrier": barriers,
        "tma": SimpleNamespace(
            async_copy_global_to_shared=copy,
            async_copy_shared_to_global=store,
            store_wait=wait_for_stores,
        ),
        "cp": copies,
        "halves": _halves,
        "split_of": _split_of,
        "start_of": _start_of,
        "from_e4m3": _from_e4m3,
        "codes_of_groups": _codes_of_groups,
        "scaled_from_e2m1": _scaled_from_e2m1,
        "unscaled": lambda sums: sums,
        "rounded": lambda x, dtype: x.to(dtype),
    }
    scopes, stand_ins = [], set(names)
    for module in _MODULES[kernel]:
        scopes.append(scope := dict(module))
        for name, value in module.items():
            if name not in stand_ins and hasattr(value, "fn"):
                function = value.fn
                names[name] = FunctionType(function.__code__, scope, name, function.__defaults__)
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
    for scope in scopes:
        scope.update(names)
    return names


def _of_warps() -> Warps:
    warps = threading.current_thread()
    assert isinstance(warps, Warps)
    return warps


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def _arrive(barrier: Barrier, count: int) -> None:
    barrier.left -= count
    barrier.changed()


def _arrive_of_warps(barrier: Barrier, count: int) -> None:
    _arrive(barrier, count)
    _of_warps().wait(lambda: True)  # others may go on before these do


def _expect(barrier: Barrier, num_bytes: int) -> None:
    barrier.num_bytes += int(num_bytes)
    _arrive(barrier, 1)


def _multiply(
    left: Any, right: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
) -> Any:
    product = Product(left, right, acc if use_acc else torch.zeros(()))
    _of_warps().products.append(product)
    return product if is_async else _wait(0, [product])


def _wait(num_left: int, deps: list[Any]) -> Any:
    products = _of_warps().products
    while len(products) > num_left:
        products.pop(0).result()
    waited = tuple(x.result() if isinstance(x, Product) and x not in products else x for x in deps)
    return waited if len(waited) > 1 else waited[0]


def _copy(part: Shared, pointer: Pointer, mask: Any) -> None:
    source = pointer.load(mask)
    part.store(torch.full(part.shape, torch.nan, dtype=source.dtype))
    _of_warps().copies[-1].append((part, source))


def _commit() -> None:
    _of_warps().copies.append([])


def _wait_for_copies(num_left: int) -> None:
    groups = _of_warps().copies
    while len(groups) - 1 > num_left:
        for part, source in groups.pop(0):
            part.store(source)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    high = (x.view(torch.int32) & -65536).view(torch.float32)
    return high.bfloat16(), (x - high).bfloat16()


def _split_of(position: Any, unit: Any) -> int:
    place = int(position) // int(unit)
    octave = max(place, 8).bit_length() - 4
    return 8 * octave + (place >> octave)


def _start_of(split: int, unit: Any) -> int:
    octave = max(split // 8 - 1, 0)
    return ((split - 8 * octave) << octave) * int(unit)


def _from_e4m3(codes: Tensor, dtype: Any) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(dtype.element_ty)


def _codes_of_groups(groups: Tensor, code: Any) -> tuple[Tensor, Tensor]:
    rows = row_codes.round_rows_reference(
        groups, RowFormat(code, groups.shape[1], 1, groups.shape[1])
    )
    return rows.codes, rows.scale[:, 0]


def _scaled_from_e2m1(
    words: Tensor, exponent: Tensor, is_high: bool, dtype: Any, in_pairs: bool
) -> Tensor:
    codes = e2m1.unpack(words.contiguous()).view(torch.uint8)
    numbers = torch.tensor(e2m1.VALUES)[(codes >> 4 if is_high else codes & 15).long()]
    return torch.ldexp(numbers, exponent[:, None] - 127).to(dtype)


class _Barriers:
    def __init__(self, num: int) -> None:
        self._all = [Barrier() for _ in range(num)]

    def index(self, i: Any) -> Barrier:
        return self._all[int(i)]


def _language(program: Program) -> Any:
    def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if layout == "barriers":
            return _Barriers(shape[0])
        # As it may be found.
        found = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
        return Shared(torch.full(shape, found).to(dtype), tuple(shape))

    def layout(*_: Any) -> None:
        return None

    def maximum(a: Any, b: Any) -> Tensor:
        return torch.maximum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    return SimpleNamespace(
        constexpr=int,
        int32=torch.int32,
        int64=torch.int64,
        bfloat16=torch.bfloat16,
        uint8=torch.uint8,
        float8e4nv=torch.float8_e4m3fn,
        float32=torch.float32,
        NVMMADistributedLayout=layout,
        NVMMASharedLayout=layout,
        BlockedLayout=layout,
        SliceLayout=layout,
        DotOperandLayout=layout,
        DistributedLinearLayout=layout,
        SwizzledSharedLayout=layout,
        static_range=range,
        pointer_type=lambda dtype: dtype,
        program_id=lambda axis: torch.tensor(program.place[axis]),
        num_programs=lambda axis: program.grid[axis],
        allocate_shared_memory=allocate,
        warp_specialize=program.warp_specialize,
        debug_barrier=lambda: None,
        load=lambda pointer, mask=None, other=0, **_: pointer.load(mask, other),
        store=lambda pointer, value, mask=None: pointer.store(value, mask),
        arange=lambda first, end, layout=None: torch.arange(first, end, dtype=torch.int32),
        zeros=lambda shape, dtype, layout=None: torch.zeros(*shape, dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(
            tuple(shape), float(value), dtype=dtype
        ),
        where=lambda which, a, b: torch.where(torch.as_tensor(which), a, b),
        max=lambda x, axis: x.amax(axis),
        maximum=maximum,
        minimum=lambda a, b: min(int(a), int(b)),
        cdiv=lambda a, b: -(-int(a) // int(b)),
        exp=torch.exp,
        exp2=torch.exp2,
        fma=lambda a, b, c: a * b + c,
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        split=lambda x: x.unbind(-1),
        convert_layout=lambda x, layout, **_: x,
        join=lambda a, b: torch.stack((a, b), -1),
        inline_asm_elementwise=lambda code, registers, values, *_, **__: values[0],
    )

"""What Triton and ptxas make of the kernels; needs no GPU."""

import importlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model import block_scaled_experts, mxfp4_few_rows
from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.block_scaled_experts import tiled_activations, tiled_parts
from outrider.kernels.model.block_scaled_product import block_scaled_product
from outrider.kernels.model.delta_net import delta_net
from outrider.kernels.model.expert_matrix import RELU_SQUARED, SILU, Activation, ExpertMatrix, Glu
from outrider.kernels.model.expert_tiles import ExpertTiles
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.gated_norm import gated_norm
from outrider.kernels.model.linear import linear
from outrider.kernels.model.mamba2 import mamba2
from outrider.kernels.model.narrow_linear import narrow_linear
from outrider.kernels.model.narrow_matrix import Kind, NarrowMatrix, RowFormat, has_4_bits
from outrider.kernels.model.narrow_product import narrow_product
from outrider.kernels.model.paged_attention import paged_attention
from outrider.kernels.model.product import product
from outrider.kernels.model.prompt_attention import is_for
from outrider.kernels.model.relu_squared import relu_squared
from outrider.kernels.model.rms_norm import Norm, block_of_row, rms_norm
from outrider.kernels.model.routing import Router, Routing, route
from outrider.kernels.model.row_codes import RowCodes, round_rows
from outrider.kernels.model.rows import BatchRows
from outrider.kernels.model.scaled_linear import scaled_linear
from outrider.kernels.model.scaled_product import scaled_product
from outrider.kernels.model.sigmoid_gate import gate_heads
from outrider.kernels.model.split_product import PeerParts, add_parts
from outrider.kernels.model.state_layer import (
    StateHeads,
    StateMemory,
    StateWeights,
    rows_kept,
)
from outrider.kernels.model.state_warpgroups import is_for as passes_by_warpgroups
from outrider.kernels.triton_or_none import HAS_GLUON

machine_code = pytest.importorskip("machine_code", exc_type=ImportError)
pytestmark = [
    pytest.mark.skipif(
        INTERPRET or not machine_code.DISASSEMBLER.exists(), reason="needs Triton's compiler"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would forget what graphs use"),
]
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def deep(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.deep)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def make_matrix(kind: Kind, num_out: int, num_in: int, group: int) -> NarrowMatrix:
    codes = empty(num_out, num_in // 2 if has_4_bits(kind) else num_in, dtype=torch.uint8)
    codes = codes.view(DTYPES.get(kind, torch.uint8))
    scale, factor = empty(-(-num_in // group), num_out, dtype=torch.float16), None
    if kind == "nvfp4":
        scale = empty(-(-num_in // 64), num_out, dtype=torch.int32)
        factor = empty(num_out, dtype=torch.float32)
    return NarrowMatrix(kind, codes, scale, None, num_in, group, factor=factor)


def make_experts(num_in: int) -> ExpertMatrix:
    matrix = make_matrix("fp4", 8 * 960, num_in, 32)
    scale = empty(*matrix.scale.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return ExpertMatrix(matrix._replace(scale=scale), empty(8 * 960), 8)


def check(kernels: list[Any]) -> None:
    assert kernels
    for kernel in kernels:
        num_products, early = machine_code.overwritten_factors(machine_code.disassembled(kernel))
        assert num_products > 0
        assert early == []


# With 7 steps each is a loop's only one, also in small tiles.
@pytest.mark.parametrize(("size", "num_in"), [(16, 448), deep(16, 960), deep(64, 960), (128, 960)])
def test_experts_do_not_overwrite_what_is_multiplied(
    size: int, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4_few_rows, "is_for", lambda *_: False)
    with machine_code.launches(machine_code.H100) as kernels:
        layer, int32 = make_experts(num_in), torch.int32
        tiles = ExpertTiles(empty(9, dtype=int32), empty(9, size, dtype=int32))
        routing = Routing(empty(50, 4, dtype=int32), empty(50, 4, dtype=torch.float32), tiles)
        experts_product(empty(50, num_in), routing, layer, Glu(1.7, 7.0, 1.0))
        experts_product(empty(200, num_in), routing, layer, None)
    assert len(kernels) == 2
    check(kernels)


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    ("num_rows", "size", "num_tiles"),
    [(8, 16, 9), (8, 16, 40), deep(50, 16, 9), (100, 32, 9), deep(200, 64, 9)],
)
def test_few_rows_of_experts_are_converted_once_and_spill_nothing(
    num_rows: int, size: int, num_tiles: int
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        layer, int32 = make_experts(2880), torch.int32
        tiles = ExpertTiles(empty(num_tiles, dtype=int32), empty(num_tiles, size, dtype=int32))
        ids, weights = empty(num_rows, 4, dtype=int32), empty(num_rows, 4).float()
        routing = Routing(ids, weights, tiles)
        experts_product(empty(num_rows, 2880), routing, layer, Glu(1.7, 7.0, 1.0))
        experts_product(empty(num_rows * 4, 2880), routing, layer, None)
    check(kernels)
    for kernel in kernels:
        assert kernel.name == "_few_rows_of_experts_kernel"
        num_spilled = len(re.findall(r"\bSTL\b", machine_code.disassembled(kernel)))
        assert num_spilled <= (4 if size == 64 else 0)  # once, not in a loop


@pytest.mark.parametrize(
    ("size", "kind", "group"), [(16, "int4", 128), deep(64, "fp8", 128), (128, "fp8", 960)]
)
def test_narrow_experts_do_not_overwrite_what_is_multiplied(
    size: int, kind: Kind, group: int
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        layer = ExpertMatrix(make_matrix(kind, 8 * 960, 960, group), None, 8)
        tiles = ExpertTiles(empty(9, dtype=torch.int32), empty(9, size, dtype=torch.int32))
        ids, weights = empty(50, 4, dtype=torch.int32), empty(50, 4, dtype=torch.float32)
        experts_product(empty(50, 960), Routing(ids, weights, tiles), layer, SILU)
    check(kernels)


@pytest.mark.parametrize(
    ("gpu", "activation", "size"),
    [
        (machine_code.H100, SILU, 16),
        deep(machine_code.H100, SILU, 128),
        deep(machine_code.RTX_4090, SILU, 16),
        (machine_code.RTX_4090, SILU, 128),
        deep(machine_code.H100, RELU_SQUARED, 16),
        deep(machine_code.H100, RELU_SQUARED, 128),
    ],
)
def test_plain_experts_are_multiplied_by_tensor_cores(
    gpu: machine_code.Gpu, activation: Activation, size: int
) -> None:
    with machine_code.launches(gpu) as kernels:
        int32 = torch.int32
        # Of a Hopper GPU, the first has wide tiles and the second has not.
        first, down = (ExpertMatrix(empty(8 * 1024, num_in), None, 8) for num_in in (2048, 480))
        tiles = ExpertTiles(empty(9, dtype=int32), empty(9, size, dtype=int32))
        routing = Routing(empty(50, 4, dtype=int32), empty(50, 4, dtype=torch.float32), tiles)
        experts_product(empty(50, 2048), routing, first, activation)
        experts_product(empty(200, 480), routing, down, None)
    assert len(kernels) == 2
    for kernel in kernels:
        code = machine_code.disassembled(kernel)
        assert re.search(r"\bHG?MMA\b", code)
        assert not re.search(r"\bSTL\b", code), "registers are spilled"


@pytest.mark.parametrize(
    ("gpu", "size"),
    [(machine_code.H100, 16), deep(machine_code.H100, 64), deep(machine_code.RTX_4090, 16)],
)
def test_experts_multiply_codes_by_codes_on_tensor_cores(gpu: machine_code.Gpu, size: int) -> None:
    def layer(num_out: int, num_in: int) -> ExpertMatrix:
        matrix = make_matrix("fp8", 8 * num_out, num_in, 128)._replace(rounds_inputs=True)
        return ExpertMatrix(matrix, None, 8)

    with machine_code.launches(gpu) as kernels:
        int32, float32 = torch.int32, torch.float32
        tiles = ExpertTiles(empty(9, dtype=int32), empty(9, size, dtype=int32))
        routing = Routing(empty(50, 4, dtype=int32), empty(50, 4, dtype=float32), tiles)
        codes = empty(50, 2048, dtype=torch.float8_e4m3fn)
        rows = RowCodes(codes, empty(50, 16, dtype=float32), torch.bfloat16)
        experts_product(rows, routing, layer(1024, 2048), SILU)
        codes = empty(200, 512, dtype=torch.float8_e4m3fn)
        inner = RowCodes(codes, empty(200, 4, dtype=float32), torch.bfloat16)
        experts_product(inner, routing, layer(2048, 512), None)
    assert len(kernels) == 2
    for kernel in kernels:
        code = machine_code.disassembled(kernel)
        assert re.search(r"\bQG?MMA\b", code)
        assert not re.search(r"\bSTL\b", code), "registers are spilled"
        assert "LDGSTS" in code, "no codes are loaded ahead"
    if gpu == machine_code.H100 and size == 16:
        _, *between, _ = re.split(r"\bQGMMA\b", code)
        assert not re.search(r"\bLDG\b", "".join(between)), "products wait for scales"


def test_a_launch_may_follow_an_import_without_triton() -> None:
    importlib.import_module("outrider.kernels.no_triton")
    with machine_code.launches(machine_code.H100) as kernels:
        norms(64)
    assert len(kernels) == 1


def test_numbers_that_share_a_word_are_converted_together() -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        narrow_product(empty(1, 512), empty(1, 64), make_matrix("fp4", 512, 64, 32), None, 1, None)
    # Of bytes, an instruction for four may get two from each of two words, as in loops of one turn.
    packed = re.findall(r"and.b32.*packed_element = (\d)", kernels[0].asm["ttgir"])
    assert set(packed) == {"1"}


@pytest.mark.parametrize(
    ("kind", "group", "num_rows"),
    [
        ("fp8", 1024, 1),
        deep("int4", 128, 1),
        deep("fp8", 1024, 100),
        ("int4", 128, 100),
        ("fp8", 1024, 200),
        deep("int4", 128, 200),
        ("nvfp4", 16, 20),
    ],
)
def test_narrow_products_do_not_overwrite_what_is_multiplied(
    num_rows: int, kind: Kind, group: int
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        matrix = make_matrix(kind, 512, 1024, group)
        narrow_product(empty(num_rows, 512), empty(num_rows, 1024), matrix, None, 1, None)
    check(kernels)


def layout_of_sum(kernel: Any) -> tuple[str, str]:
    """In which a kernel adds up the first thing that it reduces."""
    code = kernel.asm["ttgir"]
    found = re.search(r'"tt.reduce".*?tensor<(\w+), (#\w+)>', code, re.DOTALL)
    assert found is not None
    return found[1], re.findall(rf"^{found[2]} = (.*)$", code, re.MULTILINE)[0]


@pytest.mark.parametrize("width", [300, 5000])
def test_kernels_norm_a_row_in_one_way(width: int) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        matrix = make_matrix("int8", 16, width, width)._replace(rounds_inputs=True)
        assert matrix.row_format is not None
        x, norm = empty(9, width), Norm(empty(width), 1e-5)
        parts = empty(2, 9, width, dtype=torch.float32)
        rms_norm(x, norm)
        add_parts(x, parts, norm)
        round_rows(x, matrix.row_format, norm)
        add_parts(x, parts, norm._replace(rounds=matrix.row_format))
        addresses, meetings = empty(2, dtype=torch.int64), empty(64, dtype=torch.int32)
        add_parts(x, PeerParts(addresses, addresses, meetings, 0), norm)
    layouts = [layout_of_sum(kernel) for kernel in kernels]
    assert len(set(layouts)) == 1
    # Its bits depend on whether the compiler knows the divisor.
    assert not any("div.full" in kernel.asm["ptx"] for kernel in kernels)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(
    ("width", "splits", "dtype"),
    [(2048, 4, torch.float32), (2048, 9, torch.bfloat16), (5120, 4, torch.float32)],
)
def test_parts_are_loaded_together(
    width: int, splits: int, dtype: torch.dtype, rounds: bool
) -> None:
    """If each waited for sums of those before it, a few rows would take as long as all of them."""
    format_ = RowFormat(torch.float8_e4m3fn, 128, width // 128, width) if rounds else None
    with machine_code.launches(machine_code.H100) as kernels:
        parts = empty(splits, 4, width, dtype=dtype)
        add_parts(empty(4, width), parts, Norm(empty(width), 1e-5, format_))
    code = machine_code.disassembled(kernels[0])
    found = re.findall(r" (LDG|FADD|STG)\b", code)
    loads = found[: found.index("STG")].count("LDG")
    # Four numbers a thread at a time, none behind the row; residual and norm besides parts.
    each = -(-width // (block_of_row(width)["num_warps"] * 32 * 4))
    assert loads == each * (splits + 2)
    assert found[: found.index("FADD")].count("LDG") >= loads - 4


def test_volatile_loads_of_parts_leave_out_no_bytes() -> None:
    """Nothing keeps the rest of a sector of 32 bytes for the load behind."""
    with machine_code.launches(machine_code.H100) as kernels:
        format_ = RowFormat(torch.float8_e4m3fn, 128, 40, 5120)
        add_parts(
            empty(4, 5120),
            empty(4, 4, 5120, dtype=torch.float32),
            Norm(empty(5120), 1e-5, format_),
        )
    code = kernels[0].asm["ttgir"]
    used = re.findall(r"isVolatile = true} : tensor<\w+x!tt.ptr<f32>, (#\w+)>", code)
    assert len(used) == 4
    for layout in set(used):
        found = re.search(
            rf"^{layout} = .*sizePerThread = \[1, 4\], threadsPerWarp = \[32, 1\]",
            code,
            re.MULTILINE,
        )
        assert found is not None


def test_products_with_few_outputs_are_our_own_up_to_256_rows() -> None:
    with machine_code.names_of_launches(machine_code.H100) as names:
        for num_rows in (33, 256, 257):
            names.clear()
            linear(empty(num_rows, 2048), empty(96, 2048))
            assert ("_few_outputs_kernel" in names) == (num_rows <= 256)


def test_weights_of_few_outputs_are_read_before_inputs_are_there() -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        product(empty(4, 2048), empty(96, 2048))
    before, after = machine_code.disassembled(kernels[0]).split("ACQBULK")
    assert len(re.findall(r"LDG\.E\.128", before)) == 8  # each thread's part of 64 x 256
    assert "HGMMA" in after


def test_shares_of_few_outputs_are_added_once_they_are_summed() -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        for num_rows in (4, 513):
            product(empty(num_rows, 2048), empty(96, 2048))
    assert len(kernels) == 2
    for kernel in kernels:
        code = machine_code.disassembled(kernel)
        assert "HGMMA" in code
        # How many products may still be under way when a program goes on.
        assert set(re.findall(r"WARPGROUP.DEPBAR.LE gsb0, (0x\w+)", code)) == {"0x0"}


def plain(num_rows: int) -> None:
    product(empty(num_rows, 4096), empty(6144, 4096))


def narrow(kind: Kind, num_rows: int) -> None:
    narrow_linear(empty(num_rows, 4096), make_matrix(kind, 1024, 4096, 128), batch_invariant=True)


def scaled(num_out: int, num_rows: int) -> None:
    matrix = make_matrix("fp8", num_out, 4096, 4096)
    scaled_linear(empty(num_rows, 4096), matrix._replace(rounds_inputs=True))


def in_blocks(
    num_rows: int,
    num_splits: int = 1,
    *,
    num_out: int = 512,
    num_in: int = 2048,
    gated: bool = False,
    adds: bool = False,
    in_parts: bool = False,
    has_bias: bool = False,
) -> None:
    float32 = torch.float32
    scale = empty(num_in // 128, num_out // 128, dtype=float32)
    codes = empty(num_out, num_in, dtype=torch.float8_e4m3fn)
    matrix = NarrowMatrix("fp8", codes, scale, None, num_in, 128, 128, rounds_inputs=True)
    x = empty(num_rows, num_in, dtype=torch.float8_e4m3fn)
    rows = RowCodes(x, empty(num_rows, num_in // 128, dtype=float32), torch.bfloat16)
    out, bias = empty(num_rows, num_out // 2 if gated else num_out), empty(num_out)
    if in_parts:
        out = empty(num_splits, num_rows, num_out, dtype=float32)
    scaled_product(
        out, rows, matrix, bias if has_bias else None, num_splits=num_splits, gated=gated, adds=adds
    )


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    ("num_splits", "gated", "adds", "has_bias"),
    [
        (1, True, False, False),
        deep(1, True, False, True),
        deep(1, False, False, False),
        deep(1, False, True, True),
        deep(4, False, True, True),
    ],
)
def test_sums_of_blocks_stay_in_registers(
    num_splits: int, gated: bool, adds: bool, has_bias: bool
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        in_blocks(300, num_splits, gated=gated, adds=adds, has_bias=has_bias)
    (kernel,) = kernels
    assert "warp_specialize" in kernel.asm["ttgir"]
    assert kernel.metadata.shared <= machine_code.H100.shared_bytes
    code = machine_code.disassembled(kernel)
    assert re.search(r"\bQGMMA\b", code)
    assert not re.search(r"\b(STL|LDL)\b", code), "registers are spilled"


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "num_splits", "gated", "has_bias", "tiles"),
    [
        deep(4, 34816, 5120, 1, True, False, 5),
        deep(32, 34816, 5120, 1, True, True, 5),
        (64, 34816, 5120, 1, True, True, 5),
        deep(64, 51200, 5120, 1, True, False, 4),  # two programs one after the other
        deep(4, 16384, 5120, 1, False, False, 2),
        (64, 16384, 5120, 1, False, False, 2),
        deep(64, 5120, 17408, 4, False, False, 3),
        deep(64, 2048, 4096, 8, False, False, 2),
    ],
)
def test_a_program_of_few_rows_fits_a_multiprocessor(
    num_rows: int,
    num_out: int,
    num_in: int,
    num_splits: int,
    gated: bool,
    has_bias: bool,
    tiles: int,
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        in_blocks(
            num_rows, num_splits, num_out=num_out, num_in=num_in, gated=gated,
            in_parts=num_splits > 1, has_bias=has_bias,
        )  # fmt: skip
    (kernel,) = kernels
    assert "warp_specialize" in kernel.asm["ttgir"]
    assert kernel.metadata.shared <= machine_code.H100.shared_bytes
    assert kernel.metadata.num_warps == 4 * tiles + 4
    assert 32 * kernel.metadata.num_warps * kernel.metadata.maxnreg <= 1 << 16
    code = machine_code.disassembled(kernel)
    loops = re.findall(r"QGMMA.*?\bBRA\b", code, re.DOTALL)
    assert len(loops) == tiles
    assert not any(re.search(r"\b(STL|LDL)\b", loop) for loop in loops), "registers are spilled"


def attention(
    num_seqs: int, rows_each: int, batch_invariant: bool, dtype: torch.dtype = torch.bfloat16
) -> None:
    num_rows, page = num_seqs * rows_each, 16
    begins = empty(num_seqs + 1, dtype=torch.int32)
    lens, slots = empty(2, num_seqs, dtype=torch.int64)
    items = list_items(begins, lens, slots, num_rows, 8, 4, 4096, batch_invariant=batch_invariant)
    cache = empty(1, page, 8, 128, dtype=dtype)
    pages = empty(num_seqs, 4096 // page, dtype=torch.int32)
    paged_attention(empty(num_rows, 32, 128), cache, cache, items, pages, 1.0)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_prompts_do_not_overwrite_what_is_multiplied(dtype: torch.dtype) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        attention(1, 300, True, dtype)
    assert ("warp_specialize" in kernels[-1].asm["ttgir"]) == HAS_GLUON
    assert kernels[-1].metadata.shared <= machine_code.H100.shared_bytes
    check(kernels[-1:])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("heads", "page", "window", "has_sinks", "cache"),
    [
        ((64, 8, 64), 16, 128, True, torch.bfloat16),  # gpt-oss
        ((64, 8, 64), 32, None, True, torch.float8_e4m3fn),
        ((5, 1, 128), 8, 4096, True, torch.float8_e4m3fn),
        ((24, 4, 256), 256, 1024, False, torch.bfloat16),
    ],
)
def test_every_kind_of_prompt_fits_a_hopper_gpu(
    heads: tuple[int, int, int],
    page: int,
    window: int | None,
    has_sinks: bool,
    cache: torch.dtype,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    with machine_code.launches(machine_code.H100) as kernels:
        begins, lens = empty(2, dtype=torch.int32), empty(1, dtype=torch.int64)
        items = list_items(begins, lens, lens, 300, num_kv_heads, num_heads // num_kv_heads, 4096)
        pages = empty(9, page, num_kv_heads, head_dim, dtype=cache)
        table = empty(1, 4096 // page, dtype=torch.int32)
        query, sinks = empty(300, num_heads, head_dim), empty(num_heads) if has_sinks else None
        paged_attention(query, pages, pages, items, table, 1.0, window, sinks=sinks)
    assert ("warp_specialize" in kernels[-1].asm["ttgir"]) == HAS_GLUON
    assert kernels[-1].metadata.shared <= machine_code.H100.shared_bytes
    check(kernels[-1:])


def few_rows(
    heads: tuple[int, int, int],
    window: int | None = None,
    has_sinks: bool = False,
    softcap: float | None = None,
    page: int = 16,
    cache: torch.dtype = torch.bfloat16,
    *,
    causal: bool = True,
) -> None:
    """Verifications of four rows, in two sequences."""
    num_heads, num_kv_heads, head_dim = heads
    begins, lens = empty(3, dtype=torch.int32), empty(2, dtype=torch.int64)
    items = list_items(
        begins, lens, lens, 8, num_kv_heads, num_heads // num_kv_heads, 8192, batch_invariant=True
    )
    pages = empty(9, page, num_kv_heads, head_dim, dtype=cache)
    table = empty(2, 8192 // page, dtype=torch.int32)
    query, sinks = empty(8, num_heads, head_dim), empty(num_heads) if has_sinks else None
    paged_attention(query, pages, pages, items, table, 1.0, window, softcap, sinks, causal=causal)


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    ("heads", "window", "has_sinks", "page"),
    [
        ((32, 8, 128), None, False, 16),  # Qwen3-8B
        deep((64, 8, 128), 4096, True, 64),
        deep((64, 1, 128), None, False, 256),
        deep((64, 8, 64), None, True, 16),  # gpt-oss
        ((64, 8, 64), 128, True, 16),
        ((24, 4, 256), None, False, 16),  # Qwen3.6-27B
        deep((16, 2, 256), None, False, 16),  # Qwen3.6-35B-A3B
        deep((8, 4, 256), 1024, False, 16),
        deep((8, 1, 256), 512, True, 64),
        deep((64, 1, 256), None, True, 8),
    ],
)
def test_few_rows_fit_a_hopper_gpu(
    heads: tuple[int, int, int], window: int | None, has_sinks: bool, page: int
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        few_rows(heads, window, has_sinks, page=page)
    *_, rows, merging = kernels
    assert rows.metadata.name == "_few_rows_attention_kernel"
    per_sm = 2 if heads[2] == 64 else 1
    assert per_sm * (rows.metadata.shared + 1024) <= machine_code.H100.shared_bytes + 1024
    assert per_sm * 32 * rows.metadata.num_warps * rows.metadata.maxnreg <= 1 << 16
    check([rows])
    code = machine_code.disassembled(rows)
    assert heads[2] > 128 or not re.search(r"\b(STL|LDL)\b", code), "registers are spilled"
    # What was listed before the pass is read before queries are there.
    attending = code[code.index("PREEXIT") : code.index("LDG.E.128")]
    listed, _ = attending.split("ACQBULK")
    assert len(re.findall(r"\bLDG\.E R", listed)) == 6
    assert merging.metadata.name == "_merge_parts_kernel"
    loads, sums = machine_code.disassembled(merging).split("BAR.SYNC")
    # Four of a part's sums a thread: of eight splits, all at once.
    assert len(re.findall(r"\bLDG\.E\.128\b", loads)) == 8
    assert "LDG.E.128" not in sums
    assert "MUFU.EX2" not in loads


@pytest.mark.parametrize("num_rows", [2, 300])
def test_attention_refuses_heads_that_are_not_dense(num_rows: int) -> None:
    """Whichever kernel would take them."""
    with machine_code.launches(machine_code.H100):
        begins, lens = empty(3, dtype=torch.int32), empty(2, dtype=torch.int64)
        items = list_items(begins, lens, lens, num_rows, 2, 8, 8192, batch_invariant=True)
        query, pages = empty(256, num_rows, 16).permute(1, 2, 0), empty(9, 16, 2, 256)
        table = empty(2, 512, dtype=torch.int32)
        with pytest.raises(AssertionError):
            paged_attention(query, pages, pages, items, table, 1.0)


@pytest.mark.deep
@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    "launch",
    [
        partial(few_rows, (71, 1, 64)),
        partial(few_rows, (32, 8, 128), cache=torch.float8_e4m3fn),
        partial(few_rows, (128, 1, 256)),  # too many query heads for a warpgroup
        partial(few_rows, (16, 2, 256), softcap=5.0),
        partial(few_rows, (16, 2, 256), page=5),
        partial(few_rows, (16, 2, 256), cache=torch.float8_e4m3fn),
        partial(few_rows, (16, 2, 256), causal=False),
    ],
)
def test_other_few_rows_take_the_kernel_of_other_gpus(launch: Callable[[], None]) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        launch()
    assert kernels[-1].metadata.name == "_paged_attention_kernel"
    assert kernels[-1].metadata.shared <= machine_code.H100.shared_bytes


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    ("num_splits", "gated", "adds"), [(1, True, False), deep(1, False, False), (4, False, True)]
)
def test_many_rows_do_not_wait_for_scales_of_blocks_in_front_of_a_product(
    num_splits: int, gated: bool, adds: bool
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        codes, scale = empty(512, 1024, dtype=torch.float8_e4m3fn), empty(8, 4, dtype=torch.float32)
        matrix = NarrowMatrix("fp8", codes, scale, None, 1024, 128, rows=128)
        x = RowCodes(codes, empty(512, 8, dtype=torch.float32), torch.bfloat16)
        out = empty(512, 256 if gated else 512)
        block_scaled_product(out, x, matrix, None, num_splits=num_splits, gated=gated, adds=adds)
    code = machine_code.disassembled(kernels[0])
    in_front, first_product, _ = code.partition("QGMMA")
    assert first_product
    assert not re.search(r"\bFMUL\b", in_front), "scales are multiplied first"
    assert not re.search(r"\b(STL|LDL)\b", code), "registers are spilled"
    assert kernels[0].metadata.shared <= machine_code.H100.shared_bytes


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
def test_experts_of_prompts_multiply_codes_by_codes_without_spills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_scaled_experts, "uses_triton", lambda _: True)  # of made-up tensors

    def layer(num_out: int, num_in: int) -> ExpertMatrix:
        scale = empty(num_in // 128, 8 * num_out // 128)
        matrix = make_matrix("fp8", 8 * num_out, num_in, 128)._replace(scale=scale, rows=128)
        return ExpertMatrix(matrix, None, 8)

    with machine_code.launches(machine_code.H100) as kernels:
        int32, float32 = torch.int32, torch.float32
        tiles = ExpertTiles(empty(9, dtype=int32), empty(9, 128, dtype=int32))
        routing = Routing(empty(500, 2, dtype=int32), empty(500, 2, dtype=float32), tiles)
        codes = empty(500, 512, dtype=torch.float8_e4m3fn)
        rows = RowCodes(codes, empty(500, 4, dtype=float32), torch.bfloat16)
        inner = tiled_activations(rows, routing, layer(512, 512), SILU)
        tiled_parts(inner, routing, layer(512, 256), range(256))
    assert [kernel.metadata.name for kernel in kernels][1:] == 2 * ["_experts_kernel"]
    for kernel in kernels[1:]:
        code = machine_code.disassembled(kernel)
        assert "QGMMA" in code
        assert not re.search(r"\b(STL|LDL)\b", code), "registers are spilled"
        assert kernel.metadata.shared <= machine_code.H100.shared_bytes


def test_only_a_hopper_gpu_takes_its_kernel_for_prompts() -> None:
    for gpu in (machine_code.RTX_4090, machine_code.H100, machine_code.B200, machine_code.RTX_5090):
        with machine_code.launches(gpu):
            pages = empty(9, 16, 2, 128)
            takes = is_for(empty(300, 8, 128), pages, pages, None, None)
        assert takes == (HAS_GLUON and gpu is machine_code.H100)


@pytest.mark.parametrize("num_seqs", [1, 3, 64])
def test_one_kernel_lists_all_kinds_of_batches(num_seqs: int) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        for num, rows_each, batch_invariant in [
            (1, 1, False),
            (num_seqs, 4, True),
            (num_seqs, 99, False),
        ]:
            begins, lens = empty(num + 1, dtype=torch.int64), empty(num, dtype=torch.int64)
            list_items(
                begins, lens, lens, num * rows_each, 8, 4, 40_000, batch_invariant=batch_invariant
            )
    assert len({kernel.hash for kernel in kernels}) == 1


def experts(layer: ExpertMatrix, activation: Activation, size: int) -> None:
    tiles = ExpertTiles(empty(9, dtype=torch.int32), empty(9, size, dtype=torch.int32))
    chosen = empty(50, 4, dtype=torch.int32)
    routing = Routing(chosen, empty(50, 4, dtype=torch.float32), tiles)
    experts_product(empty(50, 1024), routing, layer, activation)


def plain_experts(num_out: int, size: int) -> None:
    experts(ExpertMatrix(empty(8 * num_out, 1024), None, 8), SILU, size)


def narrow_experts(kind: Kind, group: int, size: int) -> None:
    experts(ExpertMatrix(make_matrix(kind, 8 * 960, 1024, group), None, 8), SILU, size)


def mxfp4_experts(size: int) -> None:
    experts(make_experts(1024), Glu(1.7, 7.0, 1.0), size)


def routers(num_rows: int) -> None:
    logits, bias = empty(num_rows, 160), empty(160, dtype=torch.float32)
    route(logits, Router(8), empty(1, dtype=torch.int32))
    gated = Router(8, num_shared=1, gate=256)
    route(empty(num_rows, 272), gated, empty(1, dtype=torch.int32))
    route(logits, Router(6, sigmoid=True, bias=bias, num_groups=8, top_groups=3))


def states(heads: StateHeads, num_rows: int = 300) -> None:
    """A prompt's rows, and those of drafts."""
    num_values, num_slots = heads.num_value_heads, 3
    numbers = empty(num_values, dtype=torch.float32)
    weights = StateWeights(empty(4, heads.num_channels).t(), numbers, numbers)
    if not heads.corrects:
        weights = weights._replace(bias=empty(heads.num_channels), skip=numbers)
    state = empty(num_slots, num_values, heads.key_dim, heads.value_dim, dtype=torch.float32)
    ring = empty(num_slots, rows_kept(4, 3), heads.row_width)
    tokens = empty(num_slots, dtype=torch.int64)
    bounds = empty(num_slots + 1, dtype=torch.int64)
    rows = BatchRows(tokens, tokens, tokens, tokens, tokens, bounds)
    memory = StateMemory(state, ring, tokens)
    layer = delta_net if heads.corrects else mamba2
    x = empty(num_rows, heads.num_channels), empty(num_rows, heads.all_scalars)
    layer(*x, heads, weights, memory, rows, tokens)


def delta_nets() -> None:
    states(StateHeads(16, 32, 128, 128, num_scalars=2))


def mamba2s() -> None:
    states(StateHeads(8, 64, 128, 64, num_scalars=1))


@pytest.mark.parametrize(
    ("gpu", "product"),
    [(machine_code.H100, "HGMMA" if HAS_GLUON else "HMMA"), (machine_code.RTX_4090, "HMMA")],
)
@pytest.mark.parametrize("launch", [delta_nets, deep(mamba2s)])
def test_states_stay_in_registers(
    launch: Callable[[], None], gpu: machine_code.Gpu, product: str
) -> None:
    with machine_code.launches(gpu) as kernels:
        launch()
    assert len(kernels) == 3
    through_states = machine_code.disassembled(kernels[2])
    assert re.search(rf"\b{product}\b", through_states)
    assert not re.search(r"\b(STL|LDL)\b", through_states), "registers are spilled"
    # Several programs share a multiprocessor.
    assert kernels[2].metadata.shared <= gpu.shared_bytes // 4


@pytest.mark.parametrize("launch", [delta_nets, deep(mamba2s)])
def test_convolved_rows_are_rounded_in_pairs(launch: Callable[[], None]) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        launch()
    code = machine_code.disassembled(kernels[0])
    assert len(re.findall(r"\bF2F\.BF16", code)) <= 1  # of scalars
    assert len(re.findall(r"\bF2FP\.BF16\S*PACK_AB\b", code)) >= 16


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize("launch", [delta_nets, deep(mamba2s)])
def test_warpgroups_wait_for_a_cell_s_products_few_times(launch: Callable[[], None]) -> None:
    """Not after each: ptxas does that if it cannot tell which registers they use."""
    with machine_code.launches(machine_code.H100) as kernels:
        launch()
    check(kernels[2:])
    code = machine_code.disassembled(kernels[2])
    assert len(re.findall(r"\bWARPGROUP\.DEPBAR\b", code)) <= 4


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
def test_many_rows_pass_states_once_the_kernel_before_has_ended() -> None:
    heads = StateHeads(2, 4, 128, 128, num_scalars=2)
    with machine_code.launches(machine_code.H100) as kernels:
        states(heads, 256)
        states(heads, 257)
    assert [kernel.metadata.launch_pdl for kernel in kernels] == [True] * 5 + [False]


def test_only_a_hopper_gpu_passes_states_by_warpgroups() -> None:
    for gpu in (machine_code.RTX_4090, machine_code.H100, machine_code.B200, machine_code.RTX_5090):
        with machine_code.launches(gpu):
            device = empty(1).device
            takes = [
                passes_by_warpgroups(dtype, dim, dim, device)
                for dtype, dim in [
                    (torch.bfloat16, 128),
                    (torch.bfloat16, 64),
                    (torch.float16, 128),
                    (torch.bfloat16, 96),
                    (torch.bfloat16, 256),
                ]
            ]
        is_hopper = HAS_GLUON and gpu is machine_code.H100
        assert takes == [is_hopper, is_hopper, False, False, False]


def norms(width: int) -> None:
    rms_norm(empty(9, width), Norm(empty(width), 1e-5))


IN_BLOCKS = RowFormat(torch.int8, 128, 32, 4096)  # a code that every GPU has


def gates() -> None:
    gate_heads(empty(9, 16, 256), empty(9, 16, 512).chunk(2, 2)[1])
    weight, z = empty(128, dtype=torch.float32), empty(9, 2 * 32 * 128).chunk(2, 1)[1]
    gated_norm(empty(9, 32, 128), Norm(weight, 1e-6), z)
    gated_norm(empty(9, 32, 128), Norm(weight, 1e-6, IN_BLOCKS), z)
    gate_heads(empty(9, 16, 256), empty(9, 16, 512).chunk(2, 2)[1], IN_BLOCKS)
    relu_squared(empty(9, 1024))


def test_gates_are_loaded_several_at_a_time() -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        gates()
    for kernel in kernels:
        loads = re.findall(r"ld\.global\S*", kernel.asm["ptx"])
        assert loads
        assert not re.search(r"\bSTL\b", machine_code.disassembled(kernel)), "registers are spilled"
        assert all(re.search(r"\.v[24]\.b32", load) for load in loads)


GPUS = [
    pytest.param(getattr(machine_code, name), id=name)
    for name in ("A100", "RTX_3090", "RTX_4090", "H100", "B200", "RTX_5090")
]


@pytest.mark.deep
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("launch", "cases"),
    [
        (plain, [(32,), (300,)]),
        (narrow, [("int4", 200), ("int8", 1)]),
        (narrow, [("fp8", 64)]),
        (scaled, [(6144, 1), (24576, 128), (6144, 300)]),
        (in_blocks, [(1,), (100,), (300,)]),
        (attention, [(1, 4, False), (2, 300, True)]),
        (plain_experts, [(960, 16), (960, 128), (1024, 128)]),
        (narrow_experts, [("int4", 128, 16), ("int4", 128, 128)]),
        (mxfp4_experts, [(16,), (128,)]),
        (routers, [(9,), (2000,)]),
        (norms, [(5000,)]),
        (gates, [()]),
        (delta_nets, [()]),
        (mamba2s, [()]),
    ],
)
def test_kernels_compile_for_every_gpu_and_fit_into_its_shared_memory(
    gpu: machine_code.Gpu, launch: Callable[..., None], cases: list[tuple[Any, ...]]
) -> None:
    if gpu.capability < (8, 9) and (launch in (scaled, in_blocks) or cases == [("fp8", 64)]):
        pytest.skip("checkpoints in FP8 are refused there")
    with machine_code.launches(gpu) as kernels:
        for case in cases:
            launch(*case)
    assert len(kernels) >= len(cases)
    assert max(kernel.metadata.shared for kernel in kernels) <= gpu.shared_bytes
    assert all(kernel.asm["cubin"] for kernel in kernels)

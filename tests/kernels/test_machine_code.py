"""What Triton and ptxas make of the kernels; needs no GPU."""

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_launches import attention, deep, delta_nets, empty, make_experts, make_matrix, mamba2s

from outrider.kernels.model.block_scaled_product import block_scaled_product
from outrider.kernels.model.expert_matrix import SILU, Activation, ExpertMatrix, Glu
from outrider.kernels.model.expert_tiles import ExpertTiles
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.gated_norm import gated_norm
from outrider.kernels.model.linear import linear
from outrider.kernels.model.many_rows_product import many_rows_product
from outrider.kernels.model.narrow_linear import narrow_linear
from outrider.kernels.model.narrow_matrix import Kind, NarrowMatrix, RowFormat
from outrider.kernels.model.narrow_product import narrow_product
from outrider.kernels.model.product import product
from outrider.kernels.model.relu_squared import relu_squared
from outrider.kernels.model.rms_norm import Norm, block_of_row, rms_norm
from outrider.kernels.model.routing import Router, Routing, route
from outrider.kernels.model.row_codes import RowCodes, round_rows
from outrider.kernels.model.row_scaled_few_rows import row_scaled_few_rows
from outrider.kernels.model.row_scaled_product import row_scaled_product
from outrider.kernels.model.scaled_linear import scaled_linear
from outrider.kernels.model.scaled_product import scaled_product
from outrider.kernels.model.sigmoid_gate import gate_heads
from outrider.kernels.model.split_product import PeerParts, add_parts
from outrider.kernels.triton_or_none import HAS_GLUON

machine_code = pytest.importorskip("machine_code", exc_type=ImportError)
pytestmark = machine_code.MARKS


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
    machine_code.check_products(kernels)


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
            empty(4, 5120), empty(4, 4, 5120, dtype=torch.float32), Norm(empty(5120), 1e-5, format_)
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
@pytest.mark.parametrize(
    ("num_splits", "gated", "adds"), [(1, True, False), deep(1, False, False), (2, False, True)]
)
def test_products_of_rows_with_one_scale_are_one_behind_the_other(
    num_splits: int, gated: bool, adds: bool
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        codes = empty(512, 1024, dtype=torch.float8_e4m3fn)
        scale, x_scale = empty(1, 512, dtype=torch.float32), empty(512, 1, dtype=torch.float32)
        matrix = NarrowMatrix("fp8", codes, scale, None, 1024, 1024)
        x = RowCodes(codes, x_scale, torch.bfloat16)
        out = empty(512, 256 if gated else 512)
        how = {"num_splits": num_splits, "gated": gated, "adds": adds}
        row_scaled_product(out, x, matrix, None, last=0, **how)
    code = machine_code.disassembled(kernels[0])
    # From the wait for one product to that for the next there is one more under way.
    loops = re.findall(r"QGMMA(?:(?!QGMMA).)*?DEPBAR.LE gsb0, 0x1.*?\bBRA\b", code, re.DOTALL)
    assert len(loops) == 4 * num_splits
    assert not any(re.search(r"\b(STL|LDL)\b", loop) for loop in loops), "registers are spilled"
    assert kernels[0].metadata.shared <= machine_code.H100.shared_bytes


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(("num_splits", "gated"), [(1, True), (2, False)])
def test_products_of_many_rows_are_one_behind_the_other(num_splits: int, gated: bool) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        out = empty(512, 256 if gated else 512)
        many_rows_product(
            out, empty(512, 1024), empty(512, 1024), gated=gated, num_splits=num_splits
        )
    code = machine_code.disassembled(kernels[0])
    # From the wait for one product to that for the next there is one more under way.
    loops = re.findall(r"HGMMA(?:(?!HGMMA).)*?DEPBAR.LE gsb0, 0x1.*?\bBRA\b", code, re.DOTALL)
    assert len(loops) == 4 * num_splits
    assert not re.search(r"\b(STL|LDL)\b", code), "registers are spilled"
    assert not re.search(r"\bF2F\b", code), "sums are rounded one by one"
    assert kernels[0].metadata.shared <= machine_code.H100.shared_bytes


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "num_splits", "gated", "tiles"),
    [
        (160, 24576, 4096, 1, True, 3),
        deep(256, 24576, 4096, 1, True, 3),
        deep(64, 28672, 8192, 1, True, 4),
        (256, 4096, 12288, 2, False, 1),
    ],
)
def test_some_rows_with_one_scale_keep_a_block_of_products_under_way(
    num_rows: int, num_out: int, num_in: int, num_splits: int, gated: bool, tiles: int
) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        codes = empty(num_out, num_in, dtype=torch.float8_e4m3fn)
        matrix = NarrowMatrix(
            "fp8", codes, empty(1, num_out, dtype=torch.float32), None, num_in, num_in
        )
        x = RowCodes(
            empty(num_rows, num_in, dtype=torch.float8_e4m3fn),
            empty(num_rows, 1, dtype=torch.float32),
            torch.bfloat16,
        )
        out = empty(num_rows, num_out // 2)
        if not gated:
            out = empty(num_splits, num_rows, num_out, dtype=torch.float32)
        row_scaled_few_rows(out, x, matrix, None, num_splits=num_splits, last=512, gated=gated)
    (kernel,) = kernels
    assert kernel.metadata.shared <= machine_code.H100.shared_bytes
    assert kernel.metadata.num_warps == 4 * tiles + 4
    assert 32 * kernel.metadata.num_warps * kernel.metadata.maxnreg <= 1 << 16
    code = machine_code.disassembled(kernel)
    pending = 1 if num_rows in (64, 128) else 2
    loops = re.findall(
        rf"TRYWAIT((?:(?!TRYWAIT|DEPBAR).)*QGMMA.*?DEPBAR.LE gsb0, 0x{pending}.*?)\bBRA\b",
        code,
        re.DOTALL,
    )
    assert len(loops) == 2 * tiles  # the first block, and each of the others
    assert not any(re.search(r"\b(STL|LDL)\b", loop) for loop in loops[1::2]), "spilled registers"


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

"""What Triton and ptxas make of the kernels of experts; needs no GPU."""

import re

import pytest
import torch
from kernel_launches import deep, empty, make_experts, make_matrix

from outrider.kernels.model import block_scaled_experts, mxfp4_few_rows
from outrider.kernels.model.block_scaled_experts import tiled_activations, tiled_parts
from outrider.kernels.model.expert_matrix import RELU_SQUARED, SILU, Activation, ExpertMatrix, Glu
from outrider.kernels.model.expert_tiles import ExpertTiles
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.narrow_matrix import Kind
from outrider.kernels.model.routing import Routing
from outrider.kernels.model.row_codes import RowCodes
from outrider.kernels.triton_or_none import HAS_GLUON

machine_code = pytest.importorskip("machine_code", exc_type=ImportError)
pytestmark = machine_code.MARKS


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
    machine_code.check_products(kernels)


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
    machine_code.check_products(kernels)
    for kernel in kernels:
        assert kernel.name == "_few_rows_of_experts_kernel"
        num_spilled = len(re.findall(r"\bSTL\b", machine_code.disassembled(kernel)))
        assert num_spilled <= (4 if size == 64 else 0)  # once, not in a loop


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize("num_rows", [8, deep(50)])
def test_few_rows_of_plain_experts_spill_nothing(num_rows: int) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        first, down = (ExpertMatrix(empty(8 * 128, num_in), None, 8) for num_in in (2048, 768))
        tiles = ExpertTiles(empty(9, dtype=torch.int32), empty(9, 16, dtype=torch.int32))
        ids, weights = empty(num_rows, 4, dtype=torch.int32), empty(num_rows, 4).float()
        routing = Routing(ids, weights, tiles)
        experts_product(empty(num_rows, 2048), routing, first, SILU)
        experts_product(empty(num_rows * 4, 768), routing, down, None)
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.name == "_few_rows_of_plain_experts_kernel"
        code = machine_code.disassembled(kernel)
        assert len(re.findall(r"\bHGMMA\b", code)) == 8
        assert not re.findall(r"\b(STL|LDL)\b", code)


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
    machine_code.check_products(kernels)


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

"""What Triton and ptxas make of the kernels for an H100; needs no GPU."""

import pytest
import torch
from torch import Tensor

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model import experts_product as experts_module
from outrider.kernels.model import narrow_product as narrow_module
from outrider.kernels.model.expert_matrix import ExpertMatrix, Experts
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.narrow_matrix import Kind, NarrowMatrix
from outrider.kernels.model.narrow_product import narrow_product
from outrider.kernels.model.routing import Routing, Tiles

machine_code = pytest.importorskip("machine_code", exc_type=ImportError)
pytestmark = pytest.mark.skipif(
    INTERPRET or not machine_code.DISASSEMBLER.exists(), reason="needs Triton's compiler"
)
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def make_matrix(kind: Kind, num_out: int, num_in: int, group: int) -> NarrowMatrix:
    codes = empty(num_out, num_in // 2 if kind in ("int4", "fp4") else num_in, dtype=torch.uint8)
    scale = empty(num_in // group, num_out, dtype=torch.float16)
    return NarrowMatrix(kind, codes.view(DTYPES.get(kind, torch.uint8)), scale, None, num_in, group)


def make_experts(num_in: int) -> ExpertMatrix:
    matrix = make_matrix("fp4", 8 * 960, num_in, 32)
    scale = empty(*matrix.scale.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return ExpertMatrix(matrix._replace(scale=scale), empty(8 * 960), 8)


@pytest.fixture(autouse=True)
def dependent_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"DEPENDENT": True, "launch_pdl": True}
    for module in (experts_module, narrow_module):
        monkeypatch.setattr(module, "dependent_launch", lambda device: options)


def check(codes: list[str]) -> None:
    assert codes
    for code in codes:
        num_products, early = machine_code.overwritten_factors(code)
        assert num_products > 0
        assert early == []


# With 7 steps each is a loop's only one, also in small tiles.
@pytest.mark.parametrize(("size", "num_in"), [(16, 448), (16, 960), (64, 960), (128, 960)])
def test_experts_do_not_overwrite_what_is_multiplied(size: int, num_in: int) -> None:
    with machine_code.launches() as codes:
        layer, int32 = make_experts(num_in), torch.int32
        tiles = Tiles(empty(9, dtype=int32), empty(9, size, dtype=int32))
        routing = Routing(empty(50, 4, dtype=int32), empty(50, 4, dtype=torch.float32), tiles)
        experts_product(empty(50, num_in), routing, layer, Experts(layer, layer, 1.7, 7.0))
        experts_product(empty(200, num_in), routing, layer, None)
    assert len(codes) == 2
    check(codes)


@pytest.mark.parametrize("num_rows", [1, 100, 200])
@pytest.mark.parametrize(("kind", "group"), [("fp8", 1024), ("int4", 128)])
def test_narrow_products_do_not_overwrite_what_is_multiplied(
    num_rows: int, kind: Kind, group: int
) -> None:
    with machine_code.launches() as codes:
        matrix = make_matrix(kind, 512, 1024, group)
        narrow_product(empty(num_rows, 512), empty(num_rows, 1024), matrix, None, 1, None)
    check(codes)

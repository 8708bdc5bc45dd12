"""The product of few rows in FP8 on Hopper GPUs, where blocks of weights share a scale.

On a CPU its kernel runs in plain torch.
"""

from typing import Any

import block_scaled
import pytest
import torch
from block_scaled import exact, interpreted, make_matrix, make_rows, on_gpu
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model import block_scaled_few_rows as module
from outrider.kernels.model import block_scaled_product, few_rows_codes
from outrider.kernels.model import scaled_product as products
from outrider.kernels.model.block_scaled_few_rows import block_scaled_few_rows
from outrider.kernels.model.row_codes import RowCodes, round_rows
from outrider.kernels.model.scaled_product import scaled_product
from outrider.kernels.triton_or_none import HAS_GLUON

if HAS_GLUON:
    import gluon_interpreter
    from gluon_interpreter import Kernel

pytestmark = block_scaled.MARKS
KERNEL = "_block_scaled_few_rows_kernel"


@pytest.fixture(params=[2, 3, None])
def num_stages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer stages than groups, or one for each."""
    if request.param is not None:
        monkeypatch.setattr(
            module, "_num_stages", lambda _, __, groups, *___: min(groups, request.param)
        )


# Rows, outputs, inputs, parts, gated, bias; outputs that are no whole tiles among them.
CASES = [
    pytest.param(1, 40, 256, 1, False, False, id="tails"),
    pytest.param(3, 200, 1024, 1, False, True, id="bias"),
    pytest.param(9, 192, 768, 1, True, False, id="gated"),
    pytest.param(64, 64, 1024, 1, True, True, id="gated with a bias"),
    pytest.param(17, 136, 1024, 2, False, False, id="two parts"),
    pytest.param(64, 72, 1024, 4, False, False, id="four parts"),
]


@interpreted
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "num_splits", "gated", "has_bias"), CASES
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("num_stages")
def test_it_is_the_product_of_the_numbers_that_codes_stand_for(
    num_rows: int,
    num_out: int,
    num_in: int,
    num_splits: int,
    gated: bool,
    has_bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, KERNEL, Kernel(seed=num_rows, name=KERNEL))
    x, matrix = make_rows(num_rows, num_in, dtype), make_matrix((1 + gated) * num_out, num_in)
    bias = normals(1)(len(matrix.codes)).to(dtype) if has_bias else None
    expected = exact(x, matrix, bias, gated=gated)
    if num_splits > 1:  # parts, which have neither
        width = num_in // num_splits
        scales = zip(x.scale.chunk(num_splits, 1), matrix.scale.chunk(num_splits, 0), strict=True)
        expected = torch.stack(
            [
                exact(
                    RowCodes(x.codes[:, i * width :][:, :width], x_scale, dtype),
                    matrix._replace(
                        codes=matrix.codes[:, i * width :][:, :width], scale=scale, num_in=width
                    ),
                )
                for i, (x_scale, scale) in enumerate(scales)
            ]
        )
    out = torch.full_like(expected, torch.nan, dtype=torch.float32 if num_splits > 1 else dtype)
    block_scaled_few_rows(out, x, matrix, bias, num_splits=num_splits, gated=gated)
    assert (out - expected).norm() < 5e-3 * expected.norm()


@interpreted
@pytest.mark.parametrize("num_sms", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(("num_out", "num_splits", "gated"), [(500, 1, True), (700, 2, False)])
def test_any_number_of_multiprocessors_gives_the_same(
    num_sms: int, num_out: int, num_splits: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have many tiles each, or not one for all."""
    monkeypatch.setattr(module, KERNEL, Kernel(name=KERNEL))
    x, matrix = make_rows(10, 1024, torch.float16), make_matrix((1 + gated) * num_out, 1024)
    outs = []
    for num in (4, num_sms):
        monkeypatch.setattr(few_rows_codes, "num_programs", lambda *_, num=num: num)
        shape = (num_splits, 10, num_out) if num_splits > 1 else (10, num_out)
        dtype = torch.float32 if num_splits > 1 else torch.float16
        outs.append(out := torch.full(shape, torch.nan, dtype=dtype))
        block_scaled_few_rows(out, x, matrix, None, num_splits=num_splits, gated=gated)
    assert torch.equal(*outs)


@interpreted
def test_programs_that_start_last_have_fewest_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel that makes their rows still runs, they start once it has ended."""
    monkeypatch.setattr(module, KERNEL, Kernel(name=KERNEL))
    monkeypatch.setattr(few_rows_codes, "num_programs", lambda *_: 3)
    x, matrix = make_rows(1, 256, torch.bfloat16), make_matrix(256, 256)  # four tiles
    program, num_outs = gluon_interpreter.Program, []
    for which in range(3):

        def one(place: Any, grid: Any, seed: int, which: int = which) -> Any:
            return program((which, *place[1:]), grid, seed)

        monkeypatch.setattr(gluon_interpreter, "Program", one)
        out = torch.full((1, 256), torch.nan, dtype=torch.bfloat16)
        block_scaled_few_rows(out, x, matrix, None, num_splits=1, gated=False)
        num_outs.append(int((~out.isnan()).sum()))
    assert num_outs == [128, 64, 64]


@interpreted
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_warps_and_copies_gives_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_num_stages", lambda *_: 2)
    # Whose warpgroups have a tile each.
    monkeypatch.setattr(few_rows_codes, "num_programs", lambda *_: 1)
    x, matrix = make_rows(40, 5120, torch.float16), make_matrix(320, 5120)
    outs = []
    for each in (100, seed):
        monkeypatch.setattr(module, KERNEL, Kernel(None, each, KERNEL))
        outs.append(out := torch.zeros(40, 160, dtype=torch.float16))
        block_scaled_few_rows(out, x, matrix, None, num_splits=1, gated=True)
    assert torch.equal(*outs)


@pytest.mark.parametrize("where", ["codes", "scale"])
def test_nan_stays_in_its_row(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As padding may have it."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, KERNEL, Kernel(name=KERNEL))
    x, matrix = make_rows(12, 512, torch.bfloat16), make_matrix(192, 512)
    if where == "codes":
        x.codes.view(torch.uint8)[5, 300] = 0x7F
    else:
        x.scale[5, 2] = torch.nan
    out = torch.empty(12, 192, dtype=x.dtype, device=DEVICE)
    block_scaled_few_rows(out, x, matrix, None, num_splits=1, gated=False)
    is_nan = torch.arange(12, device=DEVICE)[:, None].expand(12, 192) == 5
    assert torch.equal(out.isnan(), is_nan)


@interpreted
@pytest.mark.parametrize("gated", [False, True])
def test_rows_have_the_bits_that_they_have_among_many(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of groups are exact here, so that only the order of their sum matters."""
    many, few = Kernel(2, name="_block_scaled_kernel"), Kernel(name=KERNEL)
    monkeypatch.setattr(block_scaled_product, "_block_scaled_kernel", many)
    monkeypatch.setattr(module, KERNEL, few)
    x, matrix = make_rows(70, 768, torch.float16), make_matrix(128, 768)
    out = torch.empty(70, 64 if gated else 128, dtype=torch.float16)
    block_scaled_product.block_scaled_product(
        out, x, matrix, None, num_splits=1, gated=gated, adds=False
    )
    for first, end in [(0, 1), (7, 16), (3, 67)]:
        rows = RowCodes(x.codes[first:end], x.scale[first:end], x.dtype)
        block_scaled_few_rows(
            same := out.new_empty(end - first, out.shape[1]), rows, matrix, None, num_splits=1,
            gated=gated,
        )  # fmt: skip
        assert torch.equal(same, out[first:end])


@interpreted
def test_it_takes_up_to_64_rows_that_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Portable:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: calls.append("any GPU")

    monkeypatch.setattr(block_scaled_product, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(products, "block_scaled_few_rows", lambda *_, **__: calls.append("few"))
    monkeypatch.setattr(products, "block_scaled_product", lambda *_, **__: calls.append("many"))
    monkeypatch.setattr(products, "_scaled_kernel", Portable())
    matrix, other = make_matrix(128, 512), make_matrix(128, 384)

    def taken(num_rows: int) -> list[str]:
        calls.clear()
        x, out = make_rows(num_rows, 512, torch.float16), torch.empty(num_rows, 128)
        scaled_product(out, x, matrix)
        scaled_product(torch.empty(num_rows, 64), x, matrix, gated=True)
        scaled_product(torch.empty(2, num_rows, 128), x, matrix, num_splits=2)
        scaled_product(out, x, matrix, adds=True)
        scaled_product(out, x, matrix, num_splits=2, adds=True)
        scaled_product(out, make_rows(num_rows, 384, torch.float16), other)
        return calls.copy()

    assert taken(1) == taken(64) == ["few", "few", "few", "any GPU", "any GPU", "any GPU"]
    assert taken(65) == ["many", "many", "any GPU", "many", "many", "any GPU"]


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_programs_take_the_shared_memory_that_they_have(
    rows: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "shared_bytes", lambda _: 232_448)
    num_stages = module._num_stages(rows, tiles, 136, DEVICE)
    stage, scales = (64 * tiles + rows) * 128 + 16, (2 * tiles * 256 + 136 * rows) * 4
    slack, most = 7 * 4 * rows + 512, 232_448
    assert num_stages * stage + scales + 512 <= most < (num_stages + 1) * stage + scales + slack
    assert module._num_stages(rows, tiles, 3, DEVICE) == 3


SHAPES = [
    pytest.param(40, 256, 1, False, False, id="tails"),
    pytest.param(1000, 1536, 1, False, True, id="bias"),
    pytest.param(16384, 1024, 1, False, False, id="qkv"),
    pytest.param(17408, 768, 1, True, False, id="gate and up"),
    pytest.param(512, 2048, 1, True, True, id="gated with a bias"),
    pytest.param(5120, 6144, 4, False, False, id="down"),
    pytest.param(2048, 4096, 8, False, False, id="eight parts"),
]


@on_gpu
@pytest.mark.parametrize(("num_out", "num_in", "num_splits", "gated", "has_bias"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_have_the_bits_of_the_kernel_for_any_gpu(
    num_out: int,
    num_in: int,
    num_splits: int,
    gated: bool,
    has_bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = make_matrix((1 + gated) * num_out, num_in)
    bias = normals()(len(matrix.codes)).to(dtype) if has_bias else None
    x = make_rows(64, num_in, dtype)

    def multiplied(first: int, end: int) -> Tensor:
        rows = RowCodes(x.codes[first:end], x.scale[first:end], dtype)
        shape = end - first, num_out
        out = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        if num_splits > 1:
            out = torch.full((num_splits, *shape), torch.nan, device=DEVICE)
        scaled_product(out, rows, matrix, bias, num_splits=num_splits, gated=gated)
        return out

    assert products.is_for(matrix, num_splits=num_splits, gated=gated)
    places = [(0, 1), (5, 9), (0, 8), (7, 23), (30, 47), (32, 64), (1, 34), (0, 64)]
    few = [multiplied(*place) for place in places]
    monkeypatch.setattr(products, "is_for", lambda *_, **__: False)
    for place, got in zip(places, few, strict=True):
        assert torch.equal(got, multiplied(*place)), place


@on_gpu
def test_it_waits_for_its_rows_in_a_graph() -> None:
    """Behind a kernel that makes them, which it does not wait for to copy weights."""
    matrix, randn = make_matrix(5120, 5120), normals()
    assert matrix.row_format is not None
    x, out = randn(4, 5120).bfloat16(), torch.empty(4, 5120, dtype=torch.bfloat16, device=DEVICE)

    def run() -> None:
        for _ in range(3):
            scaled_product(out, round_rows(x, matrix.row_format), matrix)
            x.copy_(out)

    start = x.clone()
    run()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        x.copy_(start)
        graph.replay()
        assert torch.equal(out, expected)

"""Compiled products of a CPU: what the weights stand for, summed the same in any company."""

from ctypes import addressof

import pytest
import torch

from outrider.kernels.cpu import layers
from outrider.kernels.cpu.layers import compiled, tiles_product, torch_on_one_thread, unpacked_tiles
from outrider.kernels.cpu.packing import Codes, Layout, PackedTiles, pack_tiles

pytestmark = pytest.mark.skipif(compiled() is None, reason="no layers were compiled here")
LAYOUTS = list(Layout)
BUILDS = layers.builds()
HIGHEST_INPUT = torch.tensor(127.0 * 256)  # of products in integers
IN_INTEGERS = {"_layers_v3"} | ({"_layers_v4"} if torch.cpu._is_vnni_supported() else set())


@pytest.fixture(params=list(BUILDS), autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test meets every build that this processor can run."""
    name: str = request.param
    monkeypatch.setattr(layers, "compiled", lambda: BUILDS[name])
    return name


def codes(num_out: int, num_in: int, layout: Layout, seed: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    if layout == Layout.PLAIN:
        return Codes(torch.randn(num_out, num_in, generator=generator))
    shape = (num_out, num_in // layout.group)
    scale = torch.randn(shape, generator=generator).to(layout.scale_dtype)
    if layout.bits == 8:
        return Codes(
            torch.randint(-128, 128, (num_out, num_in), generator=generator).to(torch.int8), scale
        )
    return Codes(
        torch.randint(0, 16, (num_out, num_in), generator=generator).to(torch.uint8),
        scale,
        torch.randn(shape, generator=generator).to(layout.scale_dtype),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_out", "num_in"), [(100, 64), (1, 32), (64, 160), (33, 576)])
def test_packing_loses_nothing(layout: Layout, num_out: int, num_in: int) -> None:
    given = codes(num_out, num_in, layout)
    kept = unpacked_tiles(pack_tiles(given, layout))
    # With fused multiply-add, scale and offset are applied with one rounding, not two.
    torch.testing.assert_close(kept, given.dequantised(), rtol=1e-6, atol=1e-6)


def most_error(x: torch.Tensor, given: Codes, build: str) -> torch.Tensor:
    """How far a product may be off: by float32's rounding, and that of inputs to 16 bits.

    Shape: x [T, K] -> [T, N].
    """
    error = 1e-5 * x.abs().double()
    if build in IN_INTEGERS and given.scale is not None:
        step = x.unflatten(1, (-1, 32)).abs().amax(2) / HIGHEST_INPUT
        error += 0.5 * step.double().repeat_interleave(32, 1)
    return error @ given.dequantised().abs().double().T + 1e-30


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_out", "num_in"), [(100, 64), (1, 32), (64, 160), (33, 576)])
def test_a_product_is_that_of_the_numbers_which_the_codes_mean(
    layout: Layout, num_out: int, num_in: int, build: str
) -> None:
    given = codes(num_out, num_in, layout)
    x, bias = torch.randn(19, num_in), torch.randn(num_out)
    truth = x.double() @ given.dequantised().double().T + bias.double()
    got = tiles_product(x, pack_tiles(given, layout), bias)
    assert ((got - truth).abs() <= most_error(x, given, build) + 1e-5).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_the_same_in_any_company_and_with_any_number_of_threads(layout: Layout) -> None:
    weight = pack_tiles(codes(97, 192, layout), layout)
    x = torch.randn(40, 192)
    alone = torch.cat([tiles_product(row[None], weight) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for begin in (0, 1, 5):
                for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33):
                    rows = slice(begin, begin + count)
                    assert torch.equal(tiles_product(x[rows], weight), alone[rows])
    finally:
        torch.set_num_threads(before)


def test_many_products_one_after_another_are_all_complete() -> None:
    """Threads that were late for one product must not meet the next."""
    weight: PackedTiles = pack_tiles(codes(320, 64, Layout.FOUR_HALF), Layout.FOUR_HALF)
    x = torch.randn(3, 64)
    truth = tiles_product(x, weight)
    before = torch.get_num_threads()
    try:
        for i in range(600):
            torch.set_num_threads(1 + i % 4)
            assert torch.equal(tiles_product(x, weight), truth)
    finally:
        torch.set_num_threads(before)


def test_torch_leaves_its_threads_to_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = pack_tiles(codes(64, 64, Layout.FOUR_HALF), Layout.FOUR_HALF)
    before, taken = torch.get_num_threads(), []

    class Watched:
        def outrider_product(self, *arguments: object) -> None:
            taken.append((arguments[-1], torch.get_num_threads()))

    monkeypatch.setattr(layers, "compiled", Watched)
    try:
        torch.set_num_threads(3)
        tiles_product(torch.zeros(1, 64), weight)
        with torch_on_one_thread(), torch_on_one_thread():
            tiles_product(torch.zeros(1, 64), weight)
        with pytest.raises(KeyError), torch_on_one_thread():
            raise KeyError
        tiles_product(torch.zeros(1, 64), weight)
        assert taken == [(3, 3), (3, 1), (3, 3)]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_size_lose_no_more_than_their_rounding(layout: Layout, build: str) -> None:
    """Some inputs of a group are far greater than the others; some groups are all 0."""
    given = codes(64, 192, layout)
    weight = pack_tiles(given, layout)
    x = torch.randn(12, 192) * 10.0 ** torch.randint(-12, 12, (12, 192)).double()
    x[3:6] *= (torch.arange(192) // 32 % 2)[None]
    x = x.float()
    truth = x.double() @ given.dequantised().double().T
    assert ((tiles_product(x, weight) - truth).abs() <= most_error(x, given, build)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_not_lost(layout: Layout, value: float) -> None:
    x = torch.randn(3, 96)
    x[1, 40] = value
    got = tiles_product(x, pack_tiles(codes(64, 96, layout), layout))
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()


def in_integers(x: torch.Tensor, given: Codes) -> torch.Tensor:
    """A product as products in integers define it, to the bit. Shape: x [T, K] -> [T, N]."""
    blocks = x.unflatten(1, (-1, 32))
    most = blocks.abs().amax(2)
    inverse = torch.where(most > 1e-30, HIGHEST_INPUT / most, 0.0)
    whole = (blocks * inverse[..., None]).round().long()
    scale, total = most / HIGHEST_INPUT, whole.sum(2)
    assert given.scale is not None
    num_groups = given.scale.shape[1]
    group = x.shape[1] // num_groups
    codes = given.codes.long().unflatten(1, (num_groups, group))
    out = torch.zeros(len(x), len(codes))

    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # rounded once
        return (a.double() * b.double() + out.double()).float()

    for i, inputs in enumerate(whole.flatten(1).unflatten(1, (num_groups, group)).unbind(1)):
        at = i * group // 32
        value = (inputs @ codes[:, i].T).float() * scale[:, at, None]
        out = add(value, given.scale[:, i].float())
        if given.offset is not None:
            out = add((scale[:, at] * total[:, at].float())[:, None], given.offset[:, i].float())
    return out


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != Layout.PLAIN])
def test_products_in_integers_have_the_same_bits_on_every_processor(
    layout: Layout, build: str
) -> None:
    if build not in IN_INTEGERS:
        pytest.skip("this build multiplies in float32")
    given = codes(97, 192, layout)
    x = torch.randn(9, 192) * 10.0 ** torch.randint(-3, 4, (9, 1))
    x[2, 32:64] = 0.0
    x[3] = 1.0  # the highest digits, of one sign
    given.codes[:3] = {4: 15, 8: -128}[layout.bits]
    assert torch.equal(tiles_product(x, pack_tiles(given, layout)), in_integers(x, given))


def attended(keys: torch.Tensor, values: torch.Tensor, rows: int, window: int) -> torch.Tensor:
    """A layer over the last `rows` tokens of one sequence, whose positions turn nothing.

    Shape: keys, values [pages, 16, 1, 16] float32, of all tokens before these rows.
    """
    hidden, dim = 32, 16
    generator = torch.Generator().manual_seed(1)

    def weight(num_out: int, num_in: int) -> layers.MatrixStruct:
        kept.append(
            pack_tiles(Codes(torch.randn(num_out, num_in, generator=generator)), Layout.PLAIN)
        )
        return layers.matrix(kept[-1], None)

    kept: list[PackedTiles] = []
    ones, zeros = torch.ones(64, hidden), torch.zeros(64, hidden)
    keys, values = keys.clone(), values.clone()
    length = keys[..., 0].numel() - 3  # the last page has room left
    layer = layers.LayerStruct(
        norm=ones.data_ptr(),
        mlp_norm=ones.data_ptr(),
        qkv=weight((2 + 2) * dim, hidden),
        output=weight(hidden, 2 * dim),
        gate_up=weight(64, hidden),
        down=weight(hidden, 32),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        cos=ones.data_ptr(),
        sin=zeros.data_ptr(),
        window=window,
    )
    shape = layers.ShapeStruct(hidden, 2, 1, dim, 32, 16, 0, 1e-5, 0.0, 0.25)
    x, taps = torch.randn(rows, hidden, generator=generator), torch.empty(rows, 1, hidden)
    decoder = layers.DecoderStruct(
        addressof(layer), 1, shape, x.data_ptr(), False, ones.data_ptr(), weight(32, hidden)
    )
    numbers = [
        [0, rows], [length], [0], [*range(rows)], [0] * rows, [*range(length - rows, length)], [0]
    ]  # fmt: skip
    of_rows = [torch.tensor(each) for each in numbers]
    table, tapped = torch.arange(len(keys), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    batch = layers.BatchStruct(
        1, 0, *(each.data_ptr() for each in of_rows), table.data_ptr(), len(table), 1, False,
        tapped.data_ptr(), taps.data_ptr(), 0, 32,
    )  # fmt: skip
    layers.run_pass(decoder, batch)
    return taps[:, 0]


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_a_row_sees_no_more_than_its_window(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    keys, values = torch.randn(2, 3, 16, 1, 16, generator=generator)
    window, length = 9, 45
    whole = attended(keys, values, rows, 0)
    within = attended(keys, values, rows, window)
    assert torch.equal(attended(keys, values, rows, length), whole)
    assert not torch.allclose(within, whole, rtol=0.01)
    before = length - rows + 1 - window  # tokens that no row sees
    for pages in (keys, values):
        pages.view(-1, 16)[:before] = torch.nan
        pages.view(-1, 16)[length:] = torch.nan
    assert torch.equal(attended(keys, values, rows, window), within)


def test_attention_in_several_waves_is_that_of_one() -> None:
    """Threads decide how many blocks of rows score their keys before any of them goes on."""
    rows = 43
    keys, values = torch.randn(2, 320, 16, 1, 16, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(16)  # one wave
        whole = attended(keys, values, rows, 0)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(attended(keys, values, rows, 0), whole)
    finally:
        torch.set_num_threads(before)

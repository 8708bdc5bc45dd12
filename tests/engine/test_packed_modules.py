"""Packed linear layers compute what the plain ones do, and only where they do."""

import pytest
import torch
from torch import nn

from outrider.engine.models import weights
from outrider.engine.models.hugging_face import PackedLinear, pack_linears
from outrider.kernels.cpu.layers import compiled
from outrider.kernels.model import packed_linear
from outrider.kernels.model.packed_linear import has_products, padded_rows

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if has_products(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 17, 64, 75])
@torch.inference_mode()
def test_packed_rows_equal_plain_rows(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 33, bias=False)).to(dtype)
    x = torch.randn(1, num_rows, 96, dtype=dtype)
    expected = model(x)
    pack_linears(model)
    assert [type(layer) for layer in model] == [PackedLinear, PackedLinear]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("num_rows", [6, 8, 15, 28])
@torch.inference_mode()
def test_rows_are_divided_also_where_few_numbers_of_rows_sum_alike(num_rows: int) -> None:
    weight, x = torch.randn(33, 96), torch.randn(num_rows, 96)
    packed = packed_linear.pack_weight(weight)
    assert packed is not None
    packed = packed._replace(blocks=(13, 7, 4))
    torch.testing.assert_close(packed_linear.packed_linear(x, packed), x @ weight.T)


def test_few_row_counts_ever_reach_the_library() -> None:
    padded = [padded_rows(n) for n in range(1, 513)]
    assert padded[:16] == [4, 4, 4, *range(4, 17)]
    assert len(set(padded)) <= 33
    assert all(n <= rows <= max(4, 1.25 * n) for n, rows in enumerate(padded, start=1))


def test_a_layer_that_packs_to_something_else_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = packed_linear.packed_linear
    monkeypatch.setattr(packed_linear, "packed_linear", lambda *args: right(*args) * 1.001)
    model = nn.Sequential(nn.Linear(8, 8))
    pack_linears(model)
    assert type(model[0]) is nn.Linear


def test_a_linear_layer_with_a_meaning_of_its_own_is_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(8, 8))
    pack_linears(model)
    assert type(model[0]) is Scaled


@pytest.mark.skipif(compiled() is None, reason="the CPU's layers are not compiled")
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rounded_rows_are_those_of_weights_in_8_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 160).to(dtype)
    x = torch.randn(2, 10, 96, dtype=dtype)
    model = nn.Sequential(linear)
    pack_linears(model, rounds=True)
    assert type(model[0]) is PackedLinear
    few, many = model(x[:, :4]), model(x)
    assert torch.equal(few, many[:, :4])
    assert model(x[:, :0]).shape == (2, 0, 160)  # a prompt's chunk wants no logits
    error = (many - linear(x)).norm() / linear(x).norm()
    assert 0.001 < error < 0.02


@torch.inference_mode()
def test_where_no_code_is_compiled_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "compiled", lambda: None)
    model = nn.Sequential(nn.Linear(96, 160))
    x = torch.randn(3, 96)
    expected = model(x)
    pack_linears(model, rounds=True)
    torch.testing.assert_close(model(x), expected)

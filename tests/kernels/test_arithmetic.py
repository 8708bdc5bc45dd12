"""What a GPU computes by instructions that the interpreter has not: both against float64."""

import pytest
import torch
import triton
import triton.language as tl
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.verify.philox import exp, exp2, log
from outrider.kernels.verify.scan import maximum

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")

INF, NAN = torch.inf, torch.nan
LEAST_NORMAL = 2.0**-126


@triton.jit
def _arithmetic_kernel(x_ptr, exp2_ptr, exp_ptr, log_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(exp2_ptr + i, exp2(x))
    tl.store(exp_ptr + i, exp(x))
    tl.store(log_ptr + i, log(x))


def computed(values: list[float]) -> tuple[torch.Tensor, ...]:
    """exp2, exp and log of the values, by the kernels. Shape: [n] float64 each."""
    block = triton.next_power_of_2(len(values))
    x = torch.zeros(block, device=DEVICE)
    x[: len(values)] = torch.tensor(values)
    out = tuple(torch.empty_like(x) for _ in range(3))
    _arithmetic_kernel[(1,)](x, *out, BLOCK=block)
    return tuple(y[: len(values)].double().cpu() for y in out)


def test_powers_are_right_and_never_subnormal() -> None:
    values = [-i / 7 for i in range(1020)] + [-126.0, -126.5, -149.0, -1e30, -3.4e38, -INF, 0.0]
    by_two, by_e, _ = computed(values)
    x = torch.tensor(values).double()
    for got, truth in ((by_two, x.exp2()), (by_e, x.exp())):
        # exp multiplies by log2 of e first: half a unit of its argument's last place.
        assert (
            ((got - truth).abs() <= truth * (3e-7 + 2e-7 * x.abs()))
            .logical_or(truth < 1.001 * LEAST_NORMAL)
            .all()
        )
        assert (got[truth < 0.999 * LEAST_NORMAL] == 0).all()
        assert got[-1] == 1
    assert computed([NAN])[0].isnan()


def test_logarithms_are_right_and_of_subnormal_numbers_those_of_zero() -> None:
    values = [2.0**-i * 1.37 for i in range(126)] + [1.0, 0.5 + 1e-6, 1 - 2.0**-24, 3e9, 3e38]
    _, _, got = computed([*values, LEAST_NORMAL / 2, 0.0, INF])
    truth = torch.tensor(values).double().log()
    assert ((got[:-3] - truth).abs() <= 3e-7 + 2e-7 * truth.abs()).all()
    assert got[-3:].tolist() == [-INF, -INF, INF]
    assert computed([NAN])[2].isnan()


@triton.jit
def _maximum_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row[:, None] * COLUMNS + column[None, :])
    of_rows = maximum(x, 1)
    tl.store(out_ptr + row, of_rows)
    tl.store(out_ptr + ROWS, maximum(of_rows, 0))


@pytest.mark.parametrize("at", [(0, 0), (7, 3), (15, 7)])
@pytest.mark.parametrize("nan", [NAN, -NAN])
def test_one_nan_makes_a_maximum_nan(at: tuple[int, int], nan: float) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    x[3, 2], x[5] = INF, -INF
    x = x.to(DEVICE)
    out = torch.empty(17, device=DEVICE)
    _maximum_kernel[(1,)](x, out, ROWS=16, COLUMNS=8)
    assert torch.equal(out, torch.cat((x.amax(1), x.amax()[None])))
    x[at] = nan
    _maximum_kernel[(1,)](x, out, ROWS=16, COLUMNS=8)
    expected = x.amax(1)
    assert torch.equal(out[:-1].isnan(), expected.isnan())
    assert torch.equal(out[:-1].nan_to_num(), expected.nan_to_num())
    assert out[-1].isnan()

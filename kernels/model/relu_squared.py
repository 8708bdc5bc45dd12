"""The activation of MLPs without a gate: max(x, 0)^2, in place."""

from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton

_AT_ONCE = 2048  # numbers of a program


def relu_squared(x: Tensor) -> Tensor:
    """Shape: any, dense. Returns x."""
    if not uses_triton(x):
        return x.relu_().square_()
    assert x.is_contiguous()
    _relu_squared_kernel[(triton.cdiv(x.numel(), _AT_ONCE),)](
        x, x.numel(), BLOCK=_AT_ONCE, **dependent_launch(x.device)
    )
    return x


@triton.jit
def _relu_squared_kernel(x_ptr, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next_kernel(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)  # keeps what is not a number
    tl.store(x_ptr + i, (x * x).to(x_ptr.dtype.element_ty), mask=i < size)

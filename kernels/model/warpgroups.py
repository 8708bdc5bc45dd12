"""What kernels share that are written for the warpgroups of a Hopper GPU.

Triton cannot say which warps copy and which multiply, so they are in Gluon, its lower level. Each
has a kernel for other GPUs beside it, which sums in the same order.
"""

from collections.abc import Callable

import torch

from .._dispatch import is_hopper
from ..triton_or_none import HAS_GLUON, gl, gluon, hopper

mbarrier = hopper.mbarrier


def has_warpgroups(device: torch.device) -> bool:
    """Whether it is a Hopper GPU, and Triton of a version that can use its warpgroups."""
    return HAS_GLUON and is_hopper(device)


def fault_of(find_error: Callable[[], float], most: float) -> str:
    """Why a kernel does not work on this machine, or "": its relative error is more than `most`, or
    finding that fails.

    Gluon is written for some versions of Triton, and copies need a driver that knows them. What
    fails there must not end a server.
    """
    try:
        error = find_error()
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:  # of the compiler, the assembler or the driver
        return f"{type(raised).__name__}: {str(raised).strip()}".splitlines()[0]
    return "" if error <= most else f"its results are wrong by {100 * error:.2g}%"


@gluon.jit
def barriers_of(NUM: gl.constexpr, COUNT: gl.constexpr):
    """For each stage a barrier, which COUNT arrivals open."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers

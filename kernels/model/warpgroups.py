"""What kernels share that are written for the warpgroups of a Hopper GPU.

Triton cannot say which warps copy and which multiply, so they are in Gluon, its lower level. Each
has a kernel for other GPUs beside it, which sums in the same order.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from .._dispatch import is_hopper, shared_bytes
from ..compiling import compile_together
from ..triton_or_none import HAS_GLUON, TensorDescriptor, gl, gluon, hopper, triton

log = logging.getLogger(__name__)

mbarrier = hopper.mbarrier


def has_warpgroups(device: torch.device) -> bool:
    """Whether it is a Hopper GPU, and Triton of a version that can use its warpgroups."""
    return HAS_GLUON and is_hopper(device)


def works(find_error: Callable[[], float], most: float, otherwise: str) -> bool:
    """Whether a kernel works on this machine: its relative error is found, and is `most` at most.
    If not, logs what happens `otherwise`, and why.

    Gluon is written for some versions of Triton, and copies need a driver that knows them. What
    fails there must not end a server.
    """
    try:
        error = find_error()
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:  # of the compiler, the assembler or the driver
        reason = f"{type(raised).__name__}: {str(raised).strip()}".splitlines()[0]
    else:
        if error <= most:
            return True
        reason = f"its results are wrong by {100 * error:.2g}%"
    log.warning("%s, since that for Hopper GPUs does not work here (%s)", otherwise, reason)
    return False


def largest_difference(
    ways: Sequence[Sequence[Callable[[], torch.Tensor]]], device: torch.device, num_rows: int = 0
) -> float:
    """The largest relative one between what the first call of a way gives and what its others give,
    of the last `num_rows` rows (0: all); NaN if one is. They are compiled together.
    """
    compile_together([call for calls in ways for call in calls], device)
    outs = [[call().float()[-num_rows:] for call in calls] for calls in ways]
    found = [(y - first).norm() / first.norm() for first, *more in outs for y in more]
    return float(torch.stack(found).max())


def registers_of(num_warpgroups: int, copying: int, programs: int = 1) -> tuple[int, int]:
    """Registers of a thread when a program starts, and of one that multiplies, once threads that
    copy keep only `copying`. So many `programs` share a multiprocessor, each with so many
    warpgroups that multiply, and warps that copy.
    """
    warps = 4 * num_warpgroups + 4  # those that copy count as four
    at_start = min(168, 2048 // (programs * warps) // 8 * 8)
    return at_start, (at_start * warps - 4 * copying) // (4 * num_warpgroups) // 8 * 8


def stages_ahead(num_stages: int, stage_bytes: int, programs: int, device: torch.device) -> int:
    """How many stages are copied ahead: all, or as many as shared memory holds, if so many
    programs share a multiprocessor.
    """
    # Of each program a kilobyte is for the multiprocessor itself, and one for barriers and what
    # warps get to work with.
    num_bytes = (shared_bytes(device) + 1024) // programs - 2048
    return min(num_stages, num_bytes // stage_bytes)


def shared_out(num_tiles: int, num_splits: int, num_sms: int, most: int) -> tuple[int, int]:
    """How many tiles a program has, `most` at most, and how many programs a split: one for each
    multiprocessor in all, or several of them one after the other.
    """
    at_once = num_sms * triton.cdiv(num_tiles * num_splits, num_sms * most)
    tiles: int = triton.cdiv(num_tiles * num_splits, at_once)
    return tiles, min(num_tiles, max(triton.cdiv(num_tiles, tiles), at_once // num_splits))


def descriptor_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """For copies of so many rows, 128 bytes of each, as tensor cores take them."""
    size = x.element_size()
    return TensorDescriptor.from_tensor(x, [rows, 128 // size], gl.NVMMASharedLayout(128, 8 * size))


@gluon.jit
def tiles_of_program(num_out, OUTS: gl.constexpr):
    """The first tile of a program, and how many it has: one a warpgroup, or one fewer.

    Of each split the last programs have fewer: they start last, where the kernel that makes the
    rows still runs.
    """
    num_tiles, here = (num_out + OUTS - 1) // OUTS, gl.program_id(0)
    each, more = num_tiles // gl.num_programs(0), num_tiles % gl.num_programs(0)
    return here * each + gl.minimum(here, more), each + (here < more).to(gl.int32)


@gluon.jit
def barriers_of(NUM: gl.constexpr, COUNT: gl.constexpr):
    """For each stage a barrier, which COUNT arrivals open."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def halves_by_eights(x):
    """The first eight of each sixteen rows of a warp, and the others, which the same threads have.

    Shape: [64, N] -> [4, 8, N] each
    """
    return gl.split(gl.permute(gl.reshape(x, [4, 2, 8, x.shape[1]]), (0, 2, 3, 1)))

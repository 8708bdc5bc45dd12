"""What products of few rows in FP8 share on a Hopper GPU: `row_scaled_few_rows` and
`block_scaled_few_rows`.

Outputs lie along the tensor cores' long side, and a program has all rows: each weight is read once.
A program fills a multiprocessor: it has a warpgroup for each tile of outputs that one gets, and a
warp that copies codes into shared memory some blocks of inputs ahead, the rows' codes once for all
warpgroups. It starts with weights, while the kernel that makes the rows still runs.
"""

from typing import Any

import torch

from .._dispatch import num_programs
from ..dependent_launch import dependent_launch, wait_for_inputs
from ..triton_or_none import gl, gluon, hopper, triton
from .warpgroups import barriers_of, registers_of, shared_out, tiles_of_program

mbarrier, tma = hopper.mbarrier, hopper.tma

BLOCK = gl.constexpr(128)  # inputs that are copied at once
OUTS = gl.constexpr(64)  # rows of the matrix in a tile; if gated, half of them are of `up`
_COPY_REGISTERS = 24


def share_out(
    num_out: int, num_splits: int, most: int, device: torch.device, *, gated: bool
) -> tuple[int, int]:
    """How many tiles a program has, `most` at most, and how many programs a split."""
    num_tiles = triton.cdiv(num_out, OUTS.value // 2 if gated else OUTS.value)
    return shared_out(num_tiles, num_splits, num_programs(device, 1), most)


def registers_for_sums(tiles: int) -> int:
    """Of a thread that multiplies, in a program of so many tiles."""
    return registers_of(tiles, _COPY_REGISTERS)[1]


def options_of(tiles: int, device: torch.device) -> dict[str, Any]:
    """With which a kernel is launched whose programs have so many tiles."""
    at_start, own = registers_of(tiles, _COPY_REGISTERS)
    return {
        "TILES": tiles,
        "WARPS": (4,) * (tiles - 1) + (1,),
        "REGISTERS": (own,) * (tiles - 1) + (_COPY_REGISTERS,),
        "num_warps": 4,
        "maxnreg": at_start,
        "enable_fp_fusion": False,  # as of many rows
        **dependent_launch(device),
    }


@gluon.jit
def stages_of(
    ROWS: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
    BOXES: gl.constexpr,
):  # fmt: skip
    """Shared memory of the rows' codes, of MORE rows behind those if there are any, and of the
    weights', each tile in BOXES; and barriers: a stage has its codes, or is free of them.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    code: gl.constexpr = gl.float8e4nv
    boxes = gl.allocate_shared_memory(code, [STAGES * TILES * BOXES, OUTS // BOXES, BLOCK], CODES)
    x_tiles = gl.allocate_shared_memory(code, [STAGES, ROWS, BLOCK], CODES)
    more_tiles = x_tiles
    if MORE > 0:
        more_tiles = gl.allocate_shared_memory(code, [STAGES, MORE, BLOCK], CODES)
    return x_tiles, more_tiles, boxes, barriers_of(STAGES, 1), barriers_of(STAGES, TILES)


@gluon.jit
def _first_input(block, share, LAST: gl.constexpr):
    """Of a block. Of a share's first blocks LAST are summed last."""
    if LAST > 0:
        block = (block + LAST) % share
    return (gl.program_id(1) * share + block) * BLOCK


@gluon.jit
def _copy_weights(
    codes, stages, block, share, num_out, first, count, ALL_ROWS: gl.constexpr,
    STAGES: gl.constexpr, LAST: gl.constexpr, TILES: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Have the weights of a block copied. The rows must follow: the stage opens with both."""
    _, _, boxes, has, _ = stages
    BOX: gl.constexpr = OUTS // BOXES
    stage = block % STAGES
    for i in gl.static_range(TILES):
        if count == i + 1:
            mbarrier.expect(has.index(stage), ((i + 1) * OUTS + ALL_ROWS) * BLOCK)
    k = _first_input(block, share, LAST)
    for i in gl.static_range(TILES * BOXES):
        if i // BOXES < count:
            row = (first + i) * BOX
            if BOXES > 1:  # each second box is of `up`
                row = (first * BOXES + i) // 2 * BOX + i % 2 * num_out
            tma.async_copy_global_to_shared(
                codes, [row, k], has.index(stage), boxes.index(TILES * BOXES * stage + i)
            )


@gluon.jit
def _copy_rows(
    x_codes, more_codes, stages, block, share, ROWS: gl.constexpr, MORE: gl.constexpr,
    STAGES: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    x_tiles, more_tiles, _, has, _ = stages
    stage, k = block % STAGES, _first_input(block, share, LAST)
    tma.async_copy_global_to_shared(x_codes, [0, k], has.index(stage), x_tiles.index(stage))
    if MORE > 0:
        tma.async_copy_global_to_shared(
            more_codes, [ROWS, k], has.index(stage), more_tiles.index(stage)
        )


@gluon.jit
def copy_codes(
    descriptors, stages, num_out, share, ROWS: gl.constexpr, MORE: gl.constexpr,
    STAGES: gl.constexpr, LAST: gl.constexpr, TILES: gl.constexpr, BOXES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Have the codes of a share of so many blocks copied, block by block. One warp."""
    x_codes, more_codes, codes = descriptors
    _, _, _, _, free = stages
    first, count = tiles_of_program(num_out, OUTS // 2 if BOXES > 1 else OUTS)
    ahead = gl.minimum(STAGES, share)
    for block in range(ahead):
        _copy_weights(
            codes, stages, block, share, num_out, first, count, ROWS + MORE, STAGES, LAST, TILES,
            BOXES,
        )  # fmt: skip
    wait_for_inputs(DEPENDENT)
    for block in range(ahead):
        _copy_rows(x_codes, more_codes, stages, block, share, ROWS, MORE, STAGES, LAST)
    for block in range(STAGES, share):
        mbarrier.wait(free.index(block % STAGES), (block // STAGES & 1) ^ 1)
        _copy_weights(
            codes, stages, block, share, num_out, first, count, ROWS + MORE, STAGES, LAST, TILES,
            BOXES,
        )  # fmt: skip
        _copy_rows(x_codes, more_codes, stages, block, share, ROWS, MORE, STAGES, LAST)

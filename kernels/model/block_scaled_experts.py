"""Products of many rows with experts' matrices on a Hopper GPU, where blocks of 128 x 128 weights
share a scale, and rows are codes too:

    inner = codes of silu(gate x) * (up x)
    parts = weight * (down inner)

Sums are those of `block_scaled_product`, from whose pieces the kernel is made: two warpgroups
multiply 64 pairs of a tile each, and a warp copies. Rows lie in the order of tiles in between, so
that whole tiles are copied: the first layer's are gathered before it, and it stores its activations
in that order, rounded. A tile that is at most half full leaves the second warpgroup idle.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import num_programs, uses_triton
from ..triton_or_none import gl, gluon, hopper, tl, triton
from .block_scaled_product import failed, sums_of_share
from .expert_matrix import Activation, ExpertMatrix, Glu
from .many_rows_tiles import BLOCK_ROWS
from .narrow_matrix import NarrowMatrix, RowFormat
from .routing import Routing
from .row_codes import RowCodes, Rows, codes_of_groups
from .silu_mul import limited_glu
from .warpgroups import barriers_of, descriptor_of, has_warpgroups

mbarrier, tma = hopper.mbarrier, hopper.tma

_PAIRS = gl.constexpr(BLOCK_ROWS)  # of a tile, half of them of each warpgroup
_ROWS = gl.constexpr(BLOCK_ROWS // 2)
_GROUP = gl.constexpr(128)  # inputs that share a scale
_OUTS = gl.constexpr(128)  # outputs that share a scale: those of a program at a time


class TiledRows(NamedTuple):
    """As RowCodes, of all pairs, in the order of tiles; anything where a tile has no pair."""

    codes: Tensor  # [tiles * 128, width]
    scale: Tensor  # [tiles * 128, groups]
    dtype: torch.dtype


def is_for(
    x: Rows, routing: Routing, first: ExpertMatrix, activation: Activation, wanted: RowFormat | None
) -> bool:
    """Whether it multiplies rows in such tiles by such experts, whose last layer has rows as
    `wanted`.
    """
    matrix = first.matrix
    return (
        isinstance(matrix, NarrowMatrix)
        and isinstance(x, RowCodes)
        and x.dtype.itemsize == 2  # to which it rounds activations first
        and isinstance(activation, Glu)
        and routing.tiles.pairs.shape[1] == BLOCK_ROWS
        and first.bias is None
        and wanted is not None
        and (wanted.dtype, wanted.group) == (torch.float8_e4m3fn, _GROUP.value)
        and matrix.codes.dtype == torch.float8_e4m3fn
        and (matrix.group, matrix.rows) == (_GROUP.value, _OUTS.value)
        and matrix.codes.shape[1] % (2 * _GROUP.value) == 0
        and first.num_out % (4 * _GROUP.value) == 0  # of both layers: pairs of groups
        and has_warpgroups(matrix.codes.device)
        and matrix.codes.device not in failed
    )


def tiled_activations(
    x: RowCodes, routing: Routing, first: ExpertMatrix, activation: Glu
) -> TiledRows:
    """The activations of each pair, rounded.

    Shape: codes [T, K], first [2 N, K] each -> codes [tiles * 128, N]
    """
    tiled, matrix = _gathered(x, routing), first.matrix
    assert isinstance(matrix, NarrowMatrix)
    num_out = first.num_out // 2
    codes = matrix.codes.new_empty(len(tiled.codes), num_out)
    scale = tiled.scale.new_empty(len(codes), num_out // _GROUP.value)
    _launch(
        codes, scale, tiled, routing, first, num_out, range(num_out), activation, STAGES=5,
        FIRST=True, DTYPE=gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16,
    )  # fmt: skip
    return TiledRows(codes, scale, x.dtype)


def tiled_parts(
    inner: TiledRows, routing: Routing, down: ExpertMatrix, some: range | None = None
) -> Tensor:
    """The outputs of each pair times its weight: all, or `some`, whole blocks of 128.

    Shape: codes [tiles * 128, K], down [N, K] each -> [k, T, N or len(some)]
    """
    num_rows, top_k = routing.ids.shape
    some = range(down.num_out) if some is None else some
    parts = inner.scale.new_empty(top_k, num_rows, len(some), dtype=inner.dtype)
    _launch(
        parts, inner.scale, inner, routing, down, down.num_out, some, Glu(0.0, 0.0, 0.0), STAGES=6,
        FIRST=False, DTYPE=None,
    )  # fmt: skip
    return parts


def _launch(
    out: Tensor, out_scale: Tensor, x: TiledRows, routing: Routing, layer: ExpertMatrix,
    num_out: int, some: range, activation: Glu, **options: Any,
) -> None:  # fmt: skip
    matrix, tiles = layer.matrix, routing.tiles
    assert isinstance(matrix, NarrowMatrix)
    assert (matrix.group, matrix.rows, layer.bias) == (_GROUP.value, _OUTS.value, None)
    assert tiles.pairs.shape[1] == _PAIRS.value
    assert some.start % _OUTS.value == len(some) % _OUTS.value == 0
    x_codes = descriptor_of(x.codes, _ROWS.value)
    codes = descriptor_of(matrix.codes, _OUTS.value)
    num_programs_ = min(
        num_programs(matrix.codes.device, 1), len(tiles.experts) * len(some) // _OUTS.value
    )
    _experts_kernel[(num_programs_,)](
        out, out_scale, x_codes, x.scale, codes, matrix.scale, routing.weights, *tiles,
        *activation, len(tiles.experts), len(routing.ids), layer.num_experts, num_out, some.start,
        len(some), len(matrix.scale), *matrix.scale.stride(), TOP_K=routing.ids.shape[1],
        num_warps=4, enable_fp_fusion=False, **options,
    )  # fmt: skip


def _gathered(x: RowCodes, routing: Routing) -> TiledRows:
    """The rows of all pairs."""
    pairs, words = routing.tiles.pairs, x.codes.view(torch.int32)
    if not uses_triton(x.codes):
        row = pairs.flatten().clamp(max=routing.ids.numel() - 1).long() // routing.ids.shape[1]
        return TiledRows(x.codes[row], x.scale[row], x.dtype)
    codes = x.codes.new_empty(pairs.numel(), x.codes.shape[1])
    scale = x.scale.new_empty(len(codes), x.scale.shape[1])
    rows = 8
    _gather_kernel[(len(codes) // rows,)](
        codes.view(torch.int32), scale, words, x.scale, pairs, routing.ids.numel(),
        TOP_K=routing.ids.shape[1], WORDS=words.shape[1], GROUPS=scale.shape[1], ROWS=rows,
        BLOCK=triton.next_power_of_2(words.shape[1]),
        SCALES=triton.next_power_of_2(scale.shape[1]), num_warps=8,
    )  # fmt: skip
    return TiledRows(codes, scale, x.dtype)


@triton.jit(do_not_specialize=["num_pairs"])
def _gather_kernel(
    out_ptr,  # [tiles * 128, WORDS]
    out_scale_ptr,  # [tiles * 128, GROUPS]
    codes_ptr,  # [num_pairs / TOP_K, WORDS]
    scale_ptr,  # [num_pairs / TOP_K, GROUPS]
    pairs_ptr,  # [tiles * 128]
    num_pairs,
    TOP_K: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Each program: ROWS rows."""
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    pair = tl.load(pairs_ptr + place)
    is_pair, row = pair < num_pairs, (pair // TOP_K).to(tl.int64)
    k, g = tl.arange(0, BLOCK)[None, :], tl.arange(0, SCALES)[None, :]
    codes = tl.load(codes_ptr + row * WORDS + k, mask=is_pair & (k < WORDS))
    scale = tl.load(scale_ptr + row * GROUPS + g, mask=is_pair & (g < GROUPS))
    place = place.to(tl.int64)
    tl.store(out_ptr + place * WORDS + k, codes, mask=is_pair & (k < WORDS))
    tl.store(out_scale_ptr + place * GROUPS + g, scale, mask=is_pair & (g < GROUPS))


@gluon.jit
def _copy(x_codes, codes, tiles, x_parts, w_tiles, has, free, sizes, STAGES: gl.constexpr,
          TOP_K: gl.constexpr, LAYERS: gl.constexpr):  # fmt: skip
    """Have the codes of all tiles copied, group by group. One warp."""
    experts_ptr, pairs_ptr = tiles
    num_tiles, num_rows, num_experts, num_out, first_out, width, num_groups = sizes
    num_n = width // _OUTS
    step = 0
    for program in range(gl.program_id(0), num_tiles * num_n, gl.num_programs(0)):
        tile, block = program // num_n, program % num_n
        expert = gl.load(experts_ptr + tile)
        if expert < num_experts:
            is_half = gl.load(pairs_ptr + tile * _PAIRS + _ROWS) == num_rows * TOP_K
            for layer in range(LAYERS):
                weight_row = (LAYERS * expert + layer) * num_out + first_out + block * _OUTS
                for group in range(num_groups):
                    stage, phase = step % STAGES, step // STAGES & 1
                    mbarrier.wait(free.index(stage), phase ^ 1)
                    if is_half:
                        mbarrier.expect(has.index(stage), (_ROWS + _OUTS) * _GROUP)
                    else:
                        mbarrier.expect(has.index(stage), (2 * _ROWS + _OUTS) * _GROUP)
                        tma.async_copy_global_to_shared(
                            x_codes, [tile * _PAIRS + _ROWS, group * _GROUP], has.index(stage),
                            x_parts.index(2 * stage + 1),
                        )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        x_codes, [tile * _PAIRS, group * _GROUP], has.index(stage),
                        x_parts.index(2 * stage),
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        codes, [weight_row, group * _GROUP], has.index(stage), w_tiles.index(stage)
                    )
                    step += 1


@gluon.jit
def _pass_by(step, num_steps, has, free, STAGES: gl.constexpr):
    """Let go of what the other warpgroup alone multiplies."""
    for _ in range(num_steps):
        stage, phase = step % STAGES, step // STAGES & 1
        mbarrier.wait(has.index(stage), phase)
        mbarrier.arrive(free.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, pointers, tiles, glu, parts, has, free, kept, sizes, scale_strides,
    STAGES: gl.constexpr, TOP_K: gl.constexpr, FIRST: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The first or second 64 pairs of all tiles. One warpgroup."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _OUTS, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    LAYERS: gl.constexpr = 2 if FIRST else 1
    out_ptr, out_scale_ptr, x_scale_ptr, scale_ptr, weights_ptr = pointers
    experts_ptr, pairs_ptr = tiles
    num_tiles, num_rows, num_experts, num_out, first_out, width, num_groups = sizes
    num_n, num_blocks = width // _OUTS, num_out // _OUTS
    scale_stride, block_stride = scale_strides
    step = 0
    for program in range(gl.program_id(0), num_tiles * num_n, gl.num_programs(0)):
        tile, block = program // num_n, program % num_n
        expert = gl.load(experts_ptr + tile)
        if expert < num_experts:
            first_of_second = gl.load(pairs_ptr + tile * _PAIRS + _ROWS)
            if (WHICH == 1) & (first_of_second == num_rows * TOP_K):
                step = _pass_by(step, LAYERS * num_groups, has, free, STAGES)
            else:
                first_row = tile * _PAIRS + WHICH * _ROWS
                row = first_row + gl.arange(0, _ROWS, ROW)
                x_scale_at = x_scale_ptr + row * num_groups
                scale_block = expert * LAYERS * num_blocks + first_out // _OUTS + block
                scale_at = scale_ptr + scale_block * block_stride
                total, step = sums_of_share(
                    WHICH, step, 0, num_groups, parts, has, free, (x_scale_at, scale_at, scale_at),
                    scale_stride, row >= 0, STAGES, False, ACC,
                )  # fmt: skip
                if FIRST:
                    kept.index(WHICH).store(total)  # registers hold no second sum
                    up_at = scale_at + num_blocks * block_stride
                    total, step = sums_of_share(
                        WHICH, step, 0, num_groups, parts, has, free, (x_scale_at, up_at, up_at),
                        scale_stride, row >= 0, STAGES, False, ACC,
                    )  # fmt: skip
                    alpha, limit, shift = glu
                    gate = kept.index(WHICH).load(ACC)
                    total = limited_glu(gate, total, alpha, limit, shift)
                    codes, scale = codes_of_groups(total.to(DTYPE).to(gl.float32), gl.float8e4nv)
                    gl.store(out_scale_ptr + row * num_n + block, scale)
                    STORED: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
                    m = (first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, STORED)))[:, None]
                    n = (block * _OUTS + gl.arange(0, _OUTS, gl.SliceLayout(0, STORED)))[None, :]
                    codes_at = out_ptr + m.to(gl.int64) * width + n
                    # By what is kept, which no product needs now: memory is short.
                    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
                    turned = kept.index(WHICH)._reinterpret(gl.float8e4nv, [_ROWS, _OUTS], PLAIN)
                    turned.store(codes)
                    gl.store(codes_at, turned.load(STORED))
                else:
                    num_pairs = num_rows * TOP_K
                    pair = gl.load(pairs_ptr + row)
                    weight = gl.load(weights_ptr + pair, mask=pair < num_pairs, other=0.0)
                    y = (total * weight[:, None]).to(out_ptr.dtype.element_ty)
                    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
                    i = gl.arange(0, _ROWS, gl.SliceLayout(1, WIDE))
                    n = block * _OUTS + gl.arange(0, _OUTS, gl.SliceLayout(0, WIDE))
                    pair = gl.load(pairs_ptr + first_row + i)
                    out_row = pair % TOP_K * num_rows + pair // TOP_K
                    out_at = out_ptr + out_row.to(gl.int64)[:, None] * width + n[None, :]
                    gl.store(out_at, gl.convert_layout(y, WIDE), mask=(pair < num_pairs)[:, None])


@gluon.jit(do_not_specialize=["num_tiles", "num_rows"])
def _experts_kernel(
    out_ptr,  # FIRST: codes [num_tiles * 128, num_out], else [TOP_K, num_rows, width]
    out_scale_ptr,  # FIRST: [num_tiles * 128, num_out / 128]
    x_codes,  # [num_tiles * 128, num_groups * 128]: a descriptor
    x_scale_ptr,  # [num_tiles * 128, num_groups]
    codes,  # [experts * (FIRST: gate and up) num_out, num_groups * 128]: a descriptor
    scale_ptr,  # [num_groups, experts * (gate and up) num_out / 128]
    weights_ptr,  # [num_rows * TOP_K]
    experts_ptr,  # [num_tiles]
    pairs_ptr,  # [num_tiles, 128]
    alpha,
    limit,
    shift,
    num_tiles,
    num_rows,
    num_experts,
    num_out,
    first_out,
    width,
    num_groups,
    scale_stride,  # between groups
    block_stride,
    STAGES: gl.constexpr,
    TOP_K: gl.constexpr,
    FIRST: gl.constexpr,
    DTYPE: gl.constexpr,  # FIRST: of activations before they are rounded
):
    """Each program strides over the tiles, all its warps in step."""
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    code: gl.constexpr = gl.float8e4nv
    LAYERS: gl.constexpr = 2 if FIRST else 1
    x_parts = gl.allocate_shared_memory(code, [2 * STAGES, _ROWS, _GROUP], CODES)
    w_tiles = gl.allocate_shared_memory(code, [STAGES, _OUTS, _GROUP], CODES)
    kept = x_parts  # not used
    if FIRST:
        kept = gl.allocate_shared_memory(
            gl.float32, [2, _ROWS, _OUTS], gl.SwizzledSharedLayout(8, 1, 16, [1, 0])
        )
    has, free = barriers_of(STAGES, 1), barriers_of(STAGES, 2)  # free of both warpgroups
    hopper.fence_async_shared()
    parts, tiles, glu = (x_parts, w_tiles), (experts_ptr, pairs_ptr), (alpha, limit, shift)
    pointers = (out_ptr, out_scale_ptr, x_scale_ptr, scale_ptr, weights_ptr)
    sizes = (num_tiles, num_rows, num_experts, num_out, first_out, width, num_groups)
    scale_strides = (scale_stride, block_stride)
    gl.warp_specialize(
        [
            (_multiply, (
                0, pointers, tiles, glu, parts, has, free, kept, sizes, scale_strides, STAGES,
                TOP_K, FIRST, DTYPE)),
            (_multiply, (
                1, pointers, tiles, glu, parts, has, free, kept, sizes, scale_strides, STAGES,
                TOP_K, FIRST, DTYPE)),
            (_copy, (
                x_codes, codes, tiles, x_parts, w_tiles, has, free, sizes, STAGES, TOP_K, LAYERS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

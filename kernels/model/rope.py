"""From qkv to queries and stored KV: RMSNorm of each head, RoPE, and the write to the pages.

rope(x) = x * cos + rotate_half(x) * sin,     rotate_half([a, b]) = [-b, a]
"""

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .fp8 import as_bytes, e4m3_bytes, to_e4m3
from .rms_norm import Norm, rms_norm_reference

_HEADS_PER_PROGRAM = 8


def rotary_table(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """scaling * cos and scaling * sin of position * inv_freq, for both halves of a head.

    Shape: positions [T], inv_freq [rotary_dim / 2] float32 -> [T, rotary_dim] each.
    """
    if not uses_triton(positions):
        return rotary_table_reference(positions, inv_freq, scaling, dtype)
    num_rows, half = len(positions), len(inv_freq)
    cos = torch.empty(num_rows, 2 * half, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    _rotary_table_kernel[(num_rows,)](
        cos, sin, positions, inv_freq, scaling, half, BLOCK=triton.next_power_of_2(half),
        num_warps=1,
    )  # fmt: skip
    return cos, sin


def rotary_table_reference(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    angle = (positions[:, None] * inv_freq).repeat(1, 2)
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    places: Tensor,
    num_heads: int,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    gated: bool = False,
) -> Tensor:
    """Store the rotated keys and the values in the pages; returns the rotated queries.

    Parameters
    ----------
    qkv
        Query heads, then key heads, then value heads of each row; may be overwritten.
        Shape: [T, (num_heads + 2 * num_kv_heads) * head_dim], dense.
    gated
        Behind each query head of qkv lies its gate, which stays as it is.
    cos, sin
        Of the dimensions that are rotated, the first of each head. Shape: [T, rotary_dim].
    k_cache, v_cache
        Shape: [num_pages, page_size, num_kv_heads, head_dim], dense. On a CPU of any dtype.
    k_scale, v_scale
        By which keys and values are divided, if pages are FP8.
    places
        page * page_size + offset for each row. Shape: [T].
    q_norm, k_norm
        RMSNorm of each head; both or neither. Weights: [head_dim].

    Returns: [T, num_heads, head_dim], any row and head stride.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    assert qkv.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.shape == k_cache.shape
    assert cos.shape[-1] <= head_dim
    if not uses_triton(qkv):
        return rope_and_store_reference(
            qkv, cos, sin, k_cache, v_cache, places, num_heads, q_norm, k_norm, k_scale,
            v_scale, gated=gated,
        )  # fmt: skip
    num_rows = len(qkv)
    all_heads = num_heads + 2 * num_kv_heads
    _rope_and_store_kernel[(num_rows, triton.cdiv(all_heads, _HEADS_PER_PROGRAM))](
        qkv, cos, sin, as_bytes(k_cache), as_bytes(v_cache), places,
        q_norm.weight if q_norm else None, k_norm.weight if k_norm else None,
        q_norm.eps if q_norm else 0.0, 1.0 / k_scale, 1.0 / v_scale, cos.stride(0), sin.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2), ROTARY_HALF=cos.shape[-1] // 2,
        HEADS=_HEADS_PER_PROGRAM, IN_FP8=k_cache.dtype == torch.float8_e4m3fn, GATED=gated,
        num_warps=4, **dependent_launch(qkv.device),
    )  # fmt: skip
    width = 2 * head_dim if gated else head_dim
    return qkv[:, : num_heads * width].view(num_rows, num_heads, width)[..., :head_dim]


def rope_and_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    places: Tensor,
    num_heads: int,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    gated: bool = False,
) -> Tensor:
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    if gated:
        heads = torch.cat((heads[:, : 2 * num_heads : 2], heads[:, 2 * num_heads :]), 1)
    if q_norm is not None and k_norm is not None:
        heads[:, :num_heads] = rms_norm_reference(heads[:, :num_heads], q_norm)
        keys = heads[:, num_heads : num_heads + num_kv_heads]
        keys.copy_(rms_norm_reference(keys, k_norm))
    whole, value = heads.tensor_split([num_heads + num_kv_heads], dim=1)
    rotary, rest = whole.tensor_split([cos.shape[-1]], dim=-1)
    first, second = rotary.chunk(2, dim=-1)
    out = rotary * cos[:, None]
    out_first, out_second = out.chunk(2, dim=-1)
    sin_first, sin_second = sin[:, None].chunk(2, dim=-1)
    out_first.addcmul_(second, sin_first, value=-1)
    out_second.addcmul_(first, sin_second)
    if rest.shape[-1]:
        out = torch.cat((out, rest), dim=-1)
    query, key = out.tensor_split([num_heads], dim=1)
    store(k_cache, places, key, k_scale)
    store(v_cache, places, value, v_scale)
    return query


def store(cache: Tensor, places: Tensor, rows: Tensor, scale: float) -> None:
    """Write rows to their places in the pages, divided by the scale if these are FP8.

    Shape: cache [num_pages, page_size, num_kv_heads, dim], places [T], rows [T, heads, dim].
    """
    in_fp8 = cache.dtype == torch.float8_e4m3fn
    kept = to_e4m3(rows.float() * (1.0 / scale)) if in_fp8 else rows.to(cache.dtype)
    as_bytes(cache.flatten(0, 1)).index_copy_(0, places, as_bytes(kept))


@triton.jit
def _rotary_table_kernel(
    cos_ptr, sin_ptr, positions_ptr, inv_freq_ptr, scaling, half, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < half
    angle = tl.load(positions_ptr + row).to(tl.float32) * tl.load(inv_freq_ptr + d, mask=mask)
    cos = (tl.cos(angle) * scaling).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scaling).to(sin_ptr.dtype.element_ty)
    at = row * 2 * half + d
    tl.store(cos_ptr + at, cos, mask=mask)
    tl.store(cos_ptr + at + half, cos, mask=mask)
    tl.store(sin_ptr + at, sin, mask=mask)
    tl.store(sin_ptr + at + half, sin, mask=mask)


@triton.jit
def _rope_and_store_kernel(
    qkv_ptr,  # [T, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]; GATED: twice as many of queries
    cos_ptr,  # [T, 2 * ROTARY_HALF]
    sin_ptr,  # [T, 2 * ROTARY_HALF]
    k_ptr,  # [num_pages * page_size, NUM_KV_HEADS, 2 * HALF]
    v_ptr,  # as k
    places_ptr,  # [T]
    q_norm_ptr,  # [2 * HALF] or None
    k_norm_ptr,  # [2 * HALF] or None
    eps,
    k_factor,
    v_factor,
    cos_stride,
    sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    IN_FP8: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: HEADS heads of one row: queries, keys and values alike."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF_PAD)[None, :]
    in_head = d < HALF
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    given = (is_query | is_key | is_value) & in_head
    # A number and the one that it is rotated with; those that are not rotated fill the pairs up.
    is_rotated = in_head & (d < ROTARY_HALF)
    at_a = tl.where(is_rotated, d, d + ROTARY_HALF)
    at_b = tl.where(is_rotated, d + ROTARY_HALF, d + HALF)

    if q_norm_ptr is not None:
        q_a = tl.load(q_norm_ptr + at_a, mask=in_head, other=0.0).to(tl.float32)
        q_b = tl.load(q_norm_ptr + at_b, mask=in_head, other=0.0).to(tl.float32)
        k_a = tl.load(k_norm_ptr + at_a, mask=in_head, other=0.0).to(tl.float32)
        k_b = tl.load(k_norm_ptr + at_b, mask=in_head, other=0.0).to(tl.float32)
    cos_ptr += row * cos_stride
    sin_ptr += row * sin_stride
    cos_a = tl.load(cos_ptr + at_a, mask=is_rotated, other=1.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + at_b, mask=is_rotated, other=1.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + at_a, mask=is_rotated, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + at_b, mask=is_rotated, other=0.0).to(tl.float32)
    place = tl.load(places_ptr + row).to(tl.int64)
    wait_for_inputs(DEPENDENT)

    num_gates = NUM_HEADS if GATED else 0
    place_of_head = head + tl.minimum(head, num_gates)
    at = qkv_ptr + row * (NUM_HEADS + num_gates + 2 * NUM_KV_HEADS) * 2 * HALF
    at += place_of_head * 2 * HALF
    raw_a = tl.load(at + at_a, mask=given, other=0.0)
    raw_b = tl.load(at + at_b, mask=given, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if q_norm_ptr is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a *= scale * tl.where(is_query, q_a, k_a)
        b *= scale * tl.where(is_query, q_b, k_b)
    rotated_a = (a * cos_a - b * sin_a).to(raw_a.dtype)
    rotated_b = (b * cos_b + a * sin_b).to(raw_a.dtype)
    tl.store(at + at_a, rotated_a, mask=is_query & in_head)
    tl.store(at + at_b, rotated_b, mask=is_query & in_head)

    if IN_FP8:
        rotated_a = e4m3_bytes(rotated_a.to(tl.float32) * k_factor)
        rotated_b = e4m3_bytes(rotated_b.to(tl.float32) * k_factor)
        raw_a = e4m3_bytes(raw_a.to(tl.float32) * v_factor)
        raw_b = e4m3_bytes(raw_b.to(tl.float32) * v_factor)
    key_head = place * NUM_KV_HEADS + head - NUM_HEADS
    key_at = k_ptr + key_head * 2 * HALF
    tl.store(key_at + at_a, rotated_a, mask=is_key & in_head)
    tl.store(key_at + at_b, rotated_b, mask=is_key & in_head)
    value_at = v_ptr + (key_head - NUM_KV_HEADS) * 2 * HALF
    tl.store(value_at + at_a, raw_a, mask=is_value & in_head)
    tl.store(value_at + at_b, raw_b, mask=is_value & in_head)

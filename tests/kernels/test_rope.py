"""Norms, RoPE and the write to the pages in one launch, against plain torch."""

from collections.abc import Callable

import pytest
import torch
from random_tensors import normals
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.rope import rope_and_store, rope_and_store_reference, rotary_table

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (7, 1, 40), (0, 2, 16)]
)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("share", [1, 2, 4])  # of which one is rotated
def test_kernel_equals_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, with_norms: bool, in_fp8: bool, share: int
) -> None:
    randn = normals(num_heads)
    num_rows, page_size = 5, 4
    qkv = randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
    rotary_dim = head_dim // (2 * share) * 2
    cos, sin = randn(num_rows, rotary_dim), randn(num_rows, rotary_dim)
    norms = [Norm(randn(head_dim), 1e-6) for _ in range(2)] if with_norms else [None, None]
    dtype, scales = torch.float32, (1.0, 1.0)
    if in_fp8:  # with what no FP8 number reaches
        dtype, scales = torch.float8_e4m3fn, (0.3, 2.0)
        qkv[1] *= 1000
    places = torch.tensor([9, 3, 17, 4, 22], device=DEVICE)
    results = []
    for function in (rope_and_store, rope_and_store_reference):
        k_cache = torch.full((6, page_size, num_kv_heads, head_dim), 7.0, device=DEVICE)
        k_cache = k_cache.to(dtype)
        v_cache = k_cache.clone()
        args = (cos, sin, k_cache, v_cache, places, num_heads, *norms, *scales)
        results.append((function(qkv.clone(), *args), k_cache.float(), v_cache.float()))
    for i, (got, expected) in enumerate(zip(*results, strict=True)):
        if in_fp8 and i > 0:
            # Which of two is nearest may hang on the last bit; and where a mantissa is rounded up
            # to the next power of two the interpreter forgets to count the exponent up.
            assert (got != expected).float().mean() < 0.01
        else:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_is_that_of_the_angles(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 77, 131_071], device=DEVICE)
    inv_freq = 1e4 ** -(torch.arange(20, device=DEVICE) / 20)  # not a power of two of them
    angles = (positions[:, None].float() * inv_freq).repeat(1, 2)
    cos, sin = rotary_table(positions, inv_freq, 1.5, dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(cos, (1.5 * angles.cos()).to(dtype), rtol=0, atol=tolerance)
    torch.testing.assert_close(sin, (1.5 * angles.sin()).to(dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("function", [rope_and_store, rope_and_store_reference])
def test_gates_between_the_queries_are_passed_over(function: Callable[..., torch.Tensor]) -> None:
    randn, num_heads, num_kv_heads, head_dim = normals(0), 9, 3, 40
    query, gate = randn(5, num_heads, head_dim), randn(5, num_heads, head_dim)
    kv, cos, sin = randn(5, 2 * num_kv_heads * head_dim), randn(5, 20), randn(5, 20)
    norms = [Norm(randn(head_dim), 1e-6) for _ in range(2)]
    places = torch.tensor([9, 3, 17, 4, 22], device=DEVICE)
    results = []
    for heads in (query, torch.stack((query, gate), 2)):
        qkv = torch.cat((heads.flatten(1), kv), 1)
        pages = [torch.zeros(6, 4, num_kv_heads, head_dim, device=DEVICE) for _ in range(2)]
        gated = heads is not query
        rotated = function(qkv, cos, sin, *pages, places, num_heads, *norms, gated=gated)
        results.append((rotated, *pages))
        if gated:
            queries = qkv[:, : heads[0].numel()].view_as(heads)
            assert torch.equal(queries[:, :, 1], gate)
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

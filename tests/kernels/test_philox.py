"""Philox against its published known answers, and what is made of its words."""

import pytest
import torch
import triton
import triton.language as tl
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.verify.philox import (
    exponential_reference,
    philox,
    philox_reference,
    pick,
    pick_reference,
    uniform_reference,
)

KNOWN = [
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (-1, (-1, -1, -1, -1), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("seed", "counter", "answer"), KNOWN)
def test_reference_gives_the_known_answers(
    seed: int, counter: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    words = philox_reference(torch.tensor(seed), *(torch.tensor(c) for c in counter))
    assert tuple(int(word) for word in words) == answer


@triton.jit
def _words_kernel(seed_ptr, counter_ptr, out_ptr, picked_ptr, total):
    c0 = tl.load(counter_ptr).to(tl.int32)
    c1 = tl.load(counter_ptr + 1).to(tl.int32)
    c2 = tl.load(counter_ptr + 2).to(tl.int32)
    c3 = tl.load(counter_ptr + 3).to(tl.int32)
    w0, w1, w2, w3 = philox(tl.load(seed_ptr), c0, c1, c2, c3)
    tl.store(out_ptr, w0.to(tl.int64))
    tl.store(out_ptr + 1, w1.to(tl.int64))
    tl.store(out_ptr + 2, w2.to(tl.int64))
    tl.store(out_ptr + 3, w3.to(tl.int64))
    tl.store(picked_ptr, pick(w0, w1, total.to(tl.int64)))


@pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize(("seed", "counter", "answer"), KNOWN)
def test_kernel_gives_the_known_answers(
    seed: int, counter: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    picked = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    total = 2**41 - 12345
    _words_kernel[(1,)](
        torch.tensor([seed], device=DEVICE),
        torch.tensor(counter, device=DEVICE),
        out,
        picked,
        total,
    )
    assert tuple(out.tolist()) == answer
    high, low = torch.tensor(answer[0]), torch.tensor(answer[1])
    assert int(picked) == int(pick_reference(high, low, torch.tensor(total)))


def test_pick_is_the_floor_of_the_exact_product() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        high, low = (int(torch.randint(2**32, (), generator=generator)) for _ in range(2))
        total = int(torch.randint(2**42, (), generator=generator))
        w = (high << 8) | (low >> 24)
        given = pick_reference(torch.tensor(high), torch.tensor(low), torch.tensor(total))
        assert int(given) == w * total >> 40


def test_uniform_is_open_at_both_ends() -> None:
    ends = uniform_reference(torch.tensor([0, 2**32 - 1]))
    assert 0 < float(ends[0]) < 1e-7
    assert 1 - 1e-7 < float(ends[1]) < 1


def test_exponential_is_precise_where_the_winner_is() -> None:
    """-log1p(-v) of small v, which log(1 - v) in float32 would quantise."""
    words = torch.tensor([0, 1, 1000, 2**20, 2**28, 2**30, 2**32 - 1])
    v = ((words.double() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    truth = torch.log(-torch.log1p(-v))
    assert torch.allclose(exponential_reference(words).log().double(), truth, atol=2e-6)

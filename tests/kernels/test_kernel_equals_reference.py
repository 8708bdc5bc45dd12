"""The kernels against the references, over dtypes, odd vocabularies, ragged drafts, mixed rows."""

import pytest
import torch
from verification import (
    DEVICE,
    HAS_KERNELS,
    Batch,
    Verified,
    equal,
    make_sampling,
    mixed_sampling,
    spread_out,
)

from outrider.kernels.verify.sampling import Rule

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or TRITON_INTERPRET=1")


def check(batch: Batch) -> Verified:
    for one_hot in (True, False):
        ours, truth = batch.verify("kernel", one_hot), batch.verify("reference", one_hot)
        assert equal(ours, truth), (ours, truth, batch.sampling)
    return ours


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(2, [1, 0, 2], None), (97, [3, 0, 1], 90), (1025, [2, 4], 1100), (2049, [0, 3], None)]


@pytest.mark.parametrize(
    ("vocab", "num_drafts", "draft_width", "dtype"),
    [
        # The interpreter tries each shape in one dtype, and a GPU in all.
        pytest.param(
            *shape, dtype, marks=pytest.mark.sweep if DEVICE.type == "cpu" and i % 3 != j else ()
        )
        for i, shape in enumerate(SHAPES)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_mixed_batch(
    vocab: int, num_drafts: list[int], draft_width: int | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    sampling = mixed_sampling(len(num_drafts), vocab + dtype.itemsize)
    check(Batch(generator, num_drafts, vocab, dtype, sampling, draft_width=draft_width))


@pytest.mark.parametrize("rule", list(Rule))
def test_thirty_two_drafts_beside_none(rule: Rule) -> None:
    """Models close enough that most drafts are accepted, past the first tile of rows."""
    generator = torch.Generator().manual_seed(5)
    sampling = make_sampling(2, rule=rule, temperature=0.3)
    batch = Batch(generator, [32, 0], 40, torch.float32, sampling, 8.0, noise=0.005)
    assert int(check(batch).num_tokens.max()) > 8


def test_match_looks_past_the_two_likeliest_groups() -> None:
    generator = torch.Generator().manual_seed(4)
    sampling = make_sampling(8, rule=Rule.MATCH)
    check(Batch(generator, [0] * 8, 2049, torch.bfloat16, sampling))


@pytest.mark.parametrize(
    "vocab", [50257, *(pytest.param(vocab, marks=pytest.mark.sweep) for vocab in (151936, 262144))]
)
def test_large_vocabulary(vocab: int) -> None:
    generator = torch.Generator().manual_seed(6)
    sampling = mixed_sampling(2, 3)
    check(Batch(generator, [1, 0], vocab, torch.bfloat16, sampling))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (32000, torch.float32),
        (50257, torch.bfloat16),
        (128256, torch.float16),
        (151936, torch.bfloat16),
    ],
)
def test_large_batch(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    num_drafts = [i % 6 for i in range(48)]
    batch = Batch(generator, num_drafts, vocab, dtype, mixed_sampling(48, vocab))
    check(batch)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_a_thousand_requests_of_ragged_drafts() -> None:
    generator = torch.Generator().manual_seed(8)
    num_drafts = [i % 33 for i in range(1024)]
    batch = Batch(generator, num_drafts, 300, torch.bfloat16, mixed_sampling(1024, 4))
    check(batch)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_rows_further_apart_than_int32_reaches() -> None:
    """More than 2**31 logits, few of them ever touched; the interpreter's integers do not wrap."""
    generator = torch.Generator().manual_seed(7)
    batch = Batch(generator, [5, 5, 5], 97, torch.bfloat16, mixed_sampling(3, 1))
    expected = batch.verify("reference")
    batch.target_logits = spread_out(batch.target_logits, 2**27)
    batch.draft_logits = spread_out(batch.draft_logits, 2**30)
    assert equal(batch.verify("kernel"), expected)

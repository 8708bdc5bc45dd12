"""Rows and pages further apart than int32 reaches: on a GPU more than 2**31 elements, few of them
ever touched. The interpreter's integers do not wrap; there the distances are short.
"""

import pytest
import torch
from verification import DEVICE, HAS_KERNELS, make_sampling, spread_out

from outrider.kernels.edits.bad_words import BadWordsState, apply_bad_words
from outrider.kernels.edits.bitmask import apply_bitmask
from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.edited_rows import put_back, take_rows
from outrider.kernels.edits.penalties import PenaltyState, apply_penalties, count_tokens
from outrider.kernels.edits.thinking import ThinkingState, end_thoughts
from outrider.kernels.edits.token_bias import BiasState, apply_token_bias
from outrider.kernels.edits.token_mask import num_words
from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.paged_attention import paged_attention
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.rope import rope_and_store
from outrider.kernels.verify.logprobs import gather_logprobs
from outrider.kernels.verify.step import SlotContents
from outrider.kernels.verify.verify import draw_draft

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")

FAR = 2**30 if DEVICE.type == "cuda" else 2**13  # elements between rows; the third is past 2**31
VOCAB = 70


def randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, torch.float16)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_logprobs() -> None:
    near = randn(3, VOCAB)
    far = spread_out(near, FAR)
    for x, y in zip(
        gather_logprobs(far, ints(1, 2, 3), 4, VOCAB),
        gather_logprobs(near, ints(1, 2, 3), 4, VOCAB),
        strict=True,
    ):
        # A row that begins elsewhere is read, and so summed, in other vectors.
        torch.testing.assert_close(x, y, rtol=1e-6, atol=0)


def test_edits_of_logits() -> None:
    near = randn(3, VOCAB)
    far = spread_out(near, FAR)
    rows = EditRows(ints(2, 0), ints(1, 0), ints(3, 3))
    token_ids = ints(*range(10, 26), dtype=torch.int32).view(2, 8)
    seen = torch.zeros(2, VOCAB, dtype=torch.int32, device=DEVICE)
    seen[1, 40:50] = 3
    one = torch.ones(2, device=DEVICE)
    penalties = PenaltyState(2 * one, one, one, spread_out(seen, FAR), ints(1, 1))
    bias = BiasState(
        ints(5, 6, 7, 8, dtype=torch.int32).view(2, 2), torch.ones(2, 2, device=DEVICE),
        ints(9, 0, 0, 9).view(2, 2), ints(2, 2, dtype=torch.int32),
    )  # fmt: skip
    words = BadWordsState(
        ints(11, 33, 19, 44, dtype=torch.int32).view(2, 2), ints(2, 2, dtype=torch.int32)[:, None],
        ints(1, 1, dtype=torch.int32), ints(1, 1),
    )  # fmt: skip
    allowed = torch.full((1, num_words(VOCAB)), 0x0FFFFFFF, dtype=torch.int32, device=DEVICE)
    states = [ThinkingState(open_id, 30, 0, 0, 0, 1) for open_id in (10, 18)]
    thoughts = torch.tensor(states, device=DEVICE)
    count_tokens(penalties, ints(1, dtype=torch.int32), token_ids, ints(1, 2))
    assert int(penalties.seen[1, 19]) == 2
    for logits in (near, far):
        apply_penalties(logits, rows, penalties, token_ids)
        apply_token_bias(logits, rows, bias, VOCAB)
        apply_bad_words(logits, rows, words, token_ids)
        apply_bitmask(logits, EditRows(ints(2), ints(0), ints(0)), allowed, VOCAB)
        end_thoughts(logits, EditRows(ints(1), ints(1), ints(3)), thoughts, token_ids, VOCAB)
        copies = take_rows(logits, rows, ints(0, 1, dtype=torch.bool))
        put_back(logits, rows, ints(0, 1, dtype=torch.bool), 2 * copies)
    assert torch.equal(near, far)
    assert (near[2] == -torch.inf).sum() > 4
    assert (near[1] != -torch.inf).nonzero().flatten().tolist() == [30]


@pytest.mark.parametrize("what", ["query", "heads", "k_cache", "v_cache"])
def test_attention(what: str) -> None:
    tensors = {
        "query": randn(3, 4, 32), "k_cache": randn(3, 16, 2, 32), "v_cache": randn(3, 16, 2, 32)
    }  # fmt: skip
    items = list_items(ints(0, 3), ints(20), ints(0), 3, 2, 2, 32)
    table = ints(2, 1, dtype=torch.int32)[None]

    def attended() -> torch.Tensor:
        return paged_attention(*tensors.values(), items, table, 0.2)

    expected = attended()
    if what == "heads":  # as models hand them over that are not fused: before the rows
        by_head = tensors["query"].transpose(0, 1).contiguous()
        tensors["query"] = spread_out(by_head, FAR).transpose(0, 1)
    else:
        tensors[what] = spread_out(tensors[what], FAR)
    assert torch.equal(attended(), expected)


def test_a_cache_of_many_pages_is_written_to_its_end() -> None:
    num_pages = 2 * FAR // (16 * 2 * 32) + 3
    k_cache, v_cache = (
        torch.empty(num_pages, 16, 2, 32, dtype=torch.float16, device=DEVICE) for _ in range(2)
    )
    qkv = randn(2, (4 + 2 + 2) * 32)
    last = num_pages * 16 - 1
    one = torch.ones(2, 32, dtype=torch.float16, device=DEVICE)
    rope_and_store(qkv.clone(), one, 0 * one, k_cache, v_cache, ints(last, 5), 4)
    heads = qkv.view(2, 8, 32)
    assert torch.equal(k_cache[-1, -1], heads[0, 4:6])
    assert torch.equal(v_cache[-1, -1], heads[0, 6:])


def test_norm() -> None:
    near, norm = randn(3, VOCAB), Norm(randn(VOCAB), 1e-5)
    assert torch.equal(rms_norm(spread_out(near, FAR), norm), rms_norm(near, norm))


def test_a_drafts_logits_are_kept_in_the_last_slot() -> None:
    num_slots, num_drafts = 2 * FAR // (8 * VOCAB) + 3, 8
    kept = torch.empty(num_slots, num_drafts, VOCAB, dtype=torch.float16, device=DEVICE)
    state = torch.zeros(num_slots, num_drafts, 4, device=DEVICE)
    slots = SlotContents(
        torch.zeros(num_slots, 12, dtype=torch.int32, device=DEVICE),
        torch.full((num_slots,), 2, device=DEVICE),
        make_sampling(num_slots),
    )
    logits = randn(1, VOCAB)
    drawn = draw_draft(logits, slots, ints(num_slots - 1), ints(7), (kept, state), VOCAB)
    assert torch.equal(kept[-1, -1], logits[0])
    assert slots.token_ids[-1, 9] == drawn[0]
    assert float(state[-1, -1, 0]) == float(logits.max())

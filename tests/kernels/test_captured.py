"""On a GPU: verification in a CUDA graph whose batch changes, and kernels that compile once."""

import random

import pytest
import torch
from verification import DEVICE, Batch, Verified, draw_draft, equal, mixed_sampling, seated

from outrider.kernels.verify.verify import draw_draft as draw_in_slots
from outrider.kernels.verify.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")]

VOCAB, K, NUM_REQS = 3000, 5, 12
# Drafts of each request, the last of them padding: other counts at every replay.
RAGGED = [[5, 0, 3, 1] * 3, [0] * 12, [2, 5, 5, 4, 0, 1] * 2, [5] * 11 + [0]]


def make_batch(seed: int, num_drafts: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        generator, num_drafts, VOCAB, torch.bfloat16,
        mixed_sampling(len(num_drafts), seed), noise=0.1,
    )  # fmt: skip


class Captured:
    """One graph of a verification and of a draft, over buffers of the largest batch."""

    def __init__(self) -> None:
        rows = NUM_REQS * (K + 1)
        zeros = lambda *shape, dtype: torch.zeros(*shape, dtype=dtype, device=DEVICE)  # noqa: E731
        self.target = zeros(rows, VOCAB, dtype=torch.bfloat16)
        self.cu_rows = zeros(NUM_REQS + 1, dtype=torch.int32)
        self.num_drafts = zeros(NUM_REQS, dtype=torch.int32)
        self.draft_logits = zeros(NUM_REQS, K, VOCAB, dtype=torch.bfloat16)
        self.state = zeros(NUM_REQS, K, 4, dtype=torch.float32)
        self.slot = torch.arange(NUM_REQS, device=DEVICE)
        none = zeros(NUM_REQS, K, dtype=torch.int64)
        self.slots = seated(mixed_sampling(NUM_REQS, 0), 7 * self.slot + 11, none)  # as a Batch's
        self.first = zeros(NUM_REQS, dtype=torch.int64)  # offset of the first draft
        self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out, self.drafted = self.run()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.draft_logits[:, 0]
        drafted = draw_in_slots(logits, self.slots, self.slot, self.first, None, VOCAB)
        out = verify(
            self.target, self.cu_rows, self.slots, self.slot, self.num_drafts, K,
            (self.draft_logits, self.state), VOCAB,
        )  # fmt: skip
        return out, drafted

    def replay(self, batch: Batch) -> tuple[Verified, torch.Tensor]:
        k_max = batch.draft_ids.shape[1]
        self.target[: len(batch.target_logits)] = batch.target_logits
        self.cu_rows[:] = batch.cu_rows
        self.num_drafts[:] = batch.num_drafts
        self.draft_logits[:, :k_max] = batch.draft_logits
        self.state[:, :k_max] = batch.state
        slots = seated(batch.sampling, batch.positions, batch.draft_ids)
        self.slots.token_ids.copy_(slots.token_ids)
        self.slots.num_tokens.copy_(slots.num_tokens)
        for mine, theirs in zip(self.slots.sampling, batch.sampling, strict=True):
            mine.copy_(theirs)
        self.graph.replay()
        return Verified.of(self.out), self.drafted


def test_graph_follows_a_batch_that_changes() -> None:
    captured = Captured()
    for seed, num_drafts in enumerate(RAGGED):
        batch = make_batch(seed, num_drafts)
        verified, drafted = captured.replay(batch)
        eager = batch.verify("kernel")
        k_max = batch.draft_ids.shape[1]
        assert torch.equal(verified.token_ids[:, : k_max + 1], eager.token_ids)
        assert (verified.token_ids[:, k_max + 1 :] == -1).all()
        assert torch.equal(verified.num_tokens, eager.num_tokens)
        assert torch.equal(verified.is_bad, eager.is_bad)
        if k_max:
            drafting = batch.num_drafts > 0
            assert torch.equal(drafted[drafting], batch.draft_ids[drafting, 0])


def test_thousands_of_replays_leave_nothing_behind() -> None:
    """Batches come in any order, without a wait between them: lists, counters and early starts of
    one replay must not show in another.
    """
    captured = Captured()
    rng = random.Random(0)
    batches, expected = [], []
    for seed in range(24):
        num_drafts = [rng.randint(0, K) for _ in range(NUM_REQS)] if seed % 4 else RAGGED[seed // 6]
        batch = make_batch(seed, num_drafts)
        token_ids, *rest = batch.verify("kernel")
        padding = K + 1 - token_ids.shape[1]
        padded = torch.nn.functional.pad(token_ids, (0, padding), value=-1)
        batches.append(batch)
        expected.append(Verified(padded, *rest))
    wrong = torch.zeros(len(batches), dtype=torch.int64, device=DEVICE)
    for _ in range(4000):
        i = rng.randrange(len(batches))
        verified, _ = captured.replay(batches[i])
        for found, truth in zip(verified, expected[i], strict=True):
            wrong[i] += (found != truth).sum()
    assert wrong.tolist() == [0] * len(batches)


def test_nothing_compiles_again_for_another_batch(compiled_kernels: list[str]) -> None:
    """Whatever the number of requests, drafts, rows or padded columns."""

    def run(num_drafts: list[int], extra_rows: int, extra_columns: int) -> None:
        batch = make_batch(1, num_drafts)
        batch.target_logits = torch.nn.functional.pad(
            batch.target_logits, (0, 72 + extra_columns, 0, extra_rows)
        )
        batch.draft_logits = torch.nn.functional.pad(batch.draft_logits, (0, 72))
        assert equal(batch.verify("kernel"), batch.verify("reference"))
        draw_draft(
            batch.draft_logits[:, 0], batch.sampling, batch.positions, batch.positions, VOCAB
        )

    run([2, 1, 0], 0, 0)
    assert compiled_kernels
    compiled_kernels.clear()
    # One column of drafts' logits would be another kernel, but a server never changes its columns.
    for num_drafts in ([2], [8, 3], [4] * 33, [0, 7] * 8):
        run(num_drafts, len(num_drafts), 16 * len(num_drafts))
    assert not compiled_kernels

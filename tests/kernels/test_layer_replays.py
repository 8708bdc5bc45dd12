"""A layer's kernels one behind another, each starting while the one before it ends."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.attention_reference import paged_attention_reference, whole_block
from outrider.kernels.model.linear import add_linear, linear, linear_reference
from outrider.kernels.model.paged_attention import paged_attention
from outrider.kernels.model.rms_norm import Norm, rms_norm, rms_norm_reference
from outrider.kernels.model.rope import rope_and_store, rope_and_store_reference

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WIDTH, INNER = 6, 2, 64, 192, 256
NUM_REQS, NUM_ROWS, PAGE = 5, 12, 16
# Rows of each sequence: decodes, verifications, padding, one that has just come.
ROWS = [[1, 1, 1, 1, 1], [5, 3, 1, 2, 1], [4, 4, 4, 0, 0], [1, 9, 0, 0, 2], [12, 0, 0, 0, 0]]
DTYPE = torch.float16  # of 16 bits, for the products that are split


class Batch(NamedTuple):
    """What changes from replay to replay."""

    hidden: Tensor  # [NUM_ROWS, WIDTH]
    cos: Tensor  # [NUM_ROWS, HEAD_DIM]
    sin: Tensor
    places: Tensor  # [NUM_ROWS]
    cu: Tensor  # [NUM_REQS + 1]
    lens: Tensor  # [NUM_REQS]
    slots: Tensor  # [NUM_REQS]


class Layer:
    def __init__(self, num_slots: int, max_len: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(DEVICE, DTYPE)

        self.qkv = randn((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, WIDTH)
        self.out = randn(WIDTH, NUM_HEADS * HEAD_DIM)
        self.gate_up, self.down = randn(2 * INNER, WIDTH), randn(WIDTH, INNER)
        self.norms = [Norm(1 + randn(WIDTH), 1e-6) for _ in range(3)]
        pages = -(-max_len // PAGE)
        order = torch.randperm(num_slots * pages, generator=generator) + 1
        self.block_table = order.view(num_slots, pages).int().to(DEVICE)
        self.k_cache = 8 * randn(num_slots * pages + 1, PAGE, NUM_KV_HEADS, HEAD_DIM)
        self.v_cache = 8 * randn(num_slots * pages + 1, PAGE, NUM_KV_HEADS, HEAD_DIM)

    def batch(self, seed: int, rows: list[int], first_slot: int, contexts: list[int]) -> Batch:
        """Sequences of the slots from `first_slot` on, which are no other batch's."""
        generator = torch.Generator().manual_seed(seed)
        slots = first_slot + torch.randperm(NUM_REQS, generator=generator)
        lens = torch.tensor(rows) + torch.tensor(contexts) * (torch.tensor(rows) > 0)
        mapping = torch.zeros(NUM_ROWS, dtype=torch.int64)  # padded rows write to page 0
        row = 0
        for slot, count, length in zip(slots.tolist(), rows, lens.tolist(), strict=True):
            for position in range(length - count, length):
                page = int(self.block_table[slot, position // PAGE])
                mapping[row] = page * PAGE + position % PAGE
                row += 1
        given = (
            torch.randn(NUM_ROWS, WIDTH, generator=generator).to(DTYPE),
            *torch.randn(2, NUM_ROWS, HEAD_DIM, generator=generator).to(DTYPE),
            mapping,
            torch.tensor([0, *rows]).cumsum(0).int(),
            lens.int(),
            slots,
        )
        return Batch(*(x.to(DEVICE) for x in given))

    def run(self, batch: Batch) -> Tensor:
        """Shape: [NUM_ROWS, WIDTH]."""
        residual = batch.hidden.clone()
        qkv = linear(residual, self.qkv, norm=self.norms[0])
        query = rope_and_store(
            qkv, batch.cos, batch.sin, self.k_cache, self.v_cache, batch.places, NUM_HEADS
        )
        items = list_items(
            batch.cu,
            batch.lens,
            batch.slots,
            NUM_ROWS,
            NUM_KV_HEADS,
            NUM_HEADS // NUM_KV_HEADS,
            self.block_table.shape[1] * PAGE,
        )
        attended = paged_attention(
            query, self.k_cache, self.v_cache, items, self.block_table, HEAD_DIM**-0.5
        )
        # Padded rows are nobody's: attention leaves them as they were.
        attended = attended.nan_to_num(0.0, 0.0, 0.0).clamp(-9, 9).flatten(1)
        normed = add_linear(residual, attended, self.out, norm=self.norms[1])
        if normed is None:
            normed = rms_norm(residual, self.norms[1])
        normed = add_linear(
            residual, linear(normed, self.gate_up, gated=True), self.down, norm=self.norms[2]
        )
        return rms_norm(residual, self.norms[2]) if normed is None else normed

    def run_reference(self, batch: Batch) -> Tensor:
        """The same in float32, of the rows that are somebody's."""
        cu, lens = batch.cu.tolist(), batch.lens.tolist()
        k_cache, v_cache = self.k_cache.float(), self.v_cache.float()
        norms = [Norm(norm.weight.float(), norm.eps) for norm in self.norms]
        residual = batch.hidden.float()
        query = rope_and_store_reference(
            linear_reference(residual, self.qkv.float(), norm=norms[0]), batch.cos.float(),
            batch.sin.float(), k_cache, v_cache, batch.places, NUM_HEADS,
        )  # fmt: skip
        attended = torch.zeros(NUM_ROWS, NUM_HEADS * HEAD_DIM, device=DEVICE)
        for i, slot in enumerate(batch.slots.tolist()):
            count = cu[i + 1] - cu[i]
            if count:
                pages = self.block_table[slot, : -(-lens[i] // PAGE)]
                group = NUM_HEADS // NUM_KV_HEADS
                blocks = whole_block(count, lens[i], None, group, torch.float32, DEVICE)
                attended[cu[i] : cu[i + 1]] = paged_attention_reference(
                    query[cu[i] : cu[i + 1]], k_cache, v_cache, pages, blocks, HEAD_DIM**-0.5
                ).flatten(1)
        residual = residual + attended @ self.out.float().t()
        normed = rms_norm_reference(residual, norms[1])
        residual += (
            linear_reference(normed, self.gate_up.float(), gated=True) @ self.down.float().t()
        )
        return rms_norm_reference(residual, norms[2])


def check(layer: Layer, batch: Batch) -> Tensor:
    """The layer's output, which is the reference's but for rounding."""
    num_rows = int(batch.cu[-1])
    expected, found = layer.run_reference(batch)[:num_rows], layer.run(batch)[:num_rows]
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    return found


def test_a_layer_equals_its_reference() -> None:
    layer = Layer(2 * NUM_REQS, 64)
    check(layer, layer.batch(1, ROWS[1], NUM_REQS, [40, 0, 17, 5, 21]))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_thousands_of_replays_follow_batches_that_change() -> None:
    """Sequences come, grow over splits and go; the bits are those of the layer alone."""
    rng = random.Random(0)
    layer = Layer(20 * NUM_REQS, 2048)
    batches = [
        layer.batch(
            i,
            ROWS[i % 5],
            i * NUM_REQS,
            [rng.choice([0, 15, 250, 600, 2000]) for _ in range(NUM_REQS)],
        )
        for i in range(20)
    ]
    expected = [check(layer, batch).clone() for batch in batches]
    buffers = Batch(*(x.clone() for x in batches[0]))
    layer.run(buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer.run(buffers)
    wrong = torch.zeros(len(batches), dtype=torch.int64, device=DEVICE)
    for _ in range(4000):
        i = rng.randrange(len(batches))
        for buffer, given in zip(buffers, batches[i], strict=True):
            buffer.copy_(given)
        graph.replay()
        wrong[i] += (output[: len(expected[i])] != expected[i]).sum()
    assert wrong.tolist() == [0] * len(batches)

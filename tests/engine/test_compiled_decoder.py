"""The compiled decoder over random shapes: it computes what `Decoder` does with the same weights,
and a row has the same bits in any company, with any number of threads and on every processor.
"""

import random

import pytest
import torch
from tiny_models import DEVICE
from torch import Tensor
from verification import HAS_KERNELS

from outrider.engine.models.attention import ForwardBatch, PagedAttention, Rope
from outrider.engine.models.blocks import Block
from outrider.engine.models.compiled_decoder import CompiledDecoder, can_compile
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.network import Network
from outrider.engine.models.parts.attention import Attention
from outrider.engine.models.parts.gated_mlp import GatedMLP
from outrider.engine.models.token_map import TokenMap
from outrider.engine.models.weights import Linear, Tiles
from outrider.kernels.cpu import layers
from outrider.kernels.cpu.packing import Codes, Layout, pack_tiles
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.rows import BatchRows

BUILDS = layers.builds()
pytestmark = pytest.mark.skipif(
    not BUILDS or DEVICE.type != "cpu" or HAS_KERNELS,
    reason="no layers were compiled here, or they are not asked",
)
IN_INTEGERS = {"_layers_v3"} | ({"_layers_v4"} if torch.cpu._is_vnni_supported() else set())

Runs = list[tuple[int, int, int]]  # slot, first position, rows


def linear(rng: random.Random, num_out: int, num_in: int) -> Linear:
    layout, size = rng.choice(list(Layout)), num_in**-0.5
    codes = Codes(torch.randn(num_out, num_in) * size)
    if layout != Layout.PLAIN:
        scale = ((torch.rand(num_out, num_in // layout.group) + 0.5) * size).to(layout.scale_dtype)
        whole = torch.randint(-128, 128, (num_out, num_in))
        if layout.bits == 8:
            codes = Codes(whole.to(torch.int8), scale / 64)
        else:
            codes = Codes((whole & 15).to(torch.uint8), scale / 4, -2 * scale)
    bias = 0.1 * torch.randn(num_out) if rng.random() < 0.3 else None
    return Linear(Tiles(pack_tiles(codes, layout), torch.float32, ""), bias)


def norm(width: int) -> Norm:
    return Norm(1 + 0.1 * torch.randn(width), 1e-5)


def decoder(rng: random.Random) -> Decoder:
    hidden, inner = 32 * rng.randint(1, 5), 32 * rng.randint(1, 5)
    kv_heads, group = 2 * rng.randint(1, 2), rng.choice([1, 2, 3, 5, 7])
    heads, dim = kv_heads * group, rng.choice([16, 32, 48, 80, 128])
    num_outputs, has_head_norms = rng.choice([31, 32, 33, 97]), rng.random() < 0.5
    rope = Rope(100.0 ** -torch.linspace(0, 1, dim // 2), 1.0)
    blocks = [
        Block(
            Attention(
                norm=norm(hidden),
                qkv=linear(rng, (heads + 2 * kv_heads) * dim, hidden),
                output=linear(rng, hidden, heads * dim),
                attention=PagedAttention(
                    heads, kv_heads, dim, dim, dim**-0.5, window=rng.choice([None, 1, 5, 40])
                ),
                rope=rope,
                head_norms=(norm(dim), norm(dim)) if has_head_norms else None,
            ),
            GatedMLP(norm(hidden), linear(rng, 2 * inner, hidden), linear(rng, hidden, inner)),
        )
        for _ in range(2)
    ]
    made = Decoder(torch.randn(103, hidden), blocks, norm(hidden), linear(rng, num_outputs, hidden))
    # What is no token of the target is written behind its vocabulary of 103.
    places = torch.randperm(103)[:num_outputs].where(torch.rand(num_outputs) < 0.8, 103)
    made.token_map = TokenMap(places, 104, torch.randint(103, (103,)))
    made.vocab_size = 104
    return made


def logits(
    network: Network, token_ids: Tensor, table: Tensor, page_size: int, steps: list[Runs]
) -> Tensor:
    """Of all tokens, by slot and position. Shape: token_ids [S, T] -> [S, T, V]."""
    for layer in network.attentions:
        network.bind_layer(layer, int(table.max()) + 1, page_size)
        for pages in layer.bound_pages:
            pages.fill_(torch.nan)
    out = torch.full((*token_ids.shape, network.vocab_size), torch.nan)
    for runs in steps:
        slot = torch.cat([torch.full((count,), slot) for slot, _, count in runs])
        position = torch.cat([torch.arange(first, first + count) for _, first, count in runs])
        place = table[slot, position // page_size].long() * page_size + position % page_size
        slots, first, count = torch.tensor(runs).T.contiguous()
        ends = torch.cat((torch.zeros(1), count.cumsum(0))).long()
        rows = BatchRows(slot, position, place, slots, first + count, ends)
        every_row = torch.arange(len(slot))
        ids, known = token_ids[slot, position], torch.full((len(token_ids),), token_ids.shape[1])
        batch = ForwardBatch(ids, rows, every_row, table[None], page_size, known)
        with torch.inference_mode():
            out[slot, position] = network(batch).logits
    return out[..., :103]


def in_parts(rng: random.Random, num_slots: int, length: int) -> list[Runs]:
    """Steps that compute every slot in runs of random lengths."""
    done, steps = [0] * num_slots, []
    while min(done) < length:
        runs = []
        for slot in rng.sample(range(num_slots), num_slots):
            count = min(rng.choice([0, 1, 1, 2, 3, 8, 9, 33]), length - done[slot])
            if count:
                runs.append((slot, done[slot], count))
                done[slot] += count
        if runs:
            steps.append(runs)
    return steps


LONG = (3, 4)  # seeds of 70 rows and wide layers; 2 has the rows and 0 the widest heads
SEEDS = [pytest.param(i, marks=pytest.mark.deep if i in LONG else ()) for i in range(6)]
SEEDS += [pytest.param(i, marks=pytest.mark.sweep) for i in range(6, 30)]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_shape_is_computed_right_and_with_the_same_bits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plain = decoder(rng)
    assert can_compile(plain)
    compiled = CompiledDecoder(plain)
    num_slots, length, page_size = 3, rng.choice([3, 20, 70]), rng.choice([1, 5, 16])
    num_pages = -(-length // page_size)
    table = torch.randperm(num_slots * num_pages).view(num_slots, num_pages).int()
    token_ids = torch.randint(0, 103, (num_slots, length))
    at_once = [[(slot, 0, length) for slot in range(num_slots)]]
    bits = {}
    for name, build in BUILDS.items():
        monkeypatch.setattr(layers, "compiled", lambda build=build: build)
        expected = logits(plain, token_ids, table, page_size, at_once)
        bits[name] = logits(compiled, token_ids, table, page_size, at_once)
        is_drafted = expected.isfinite()
        error = (bits[name] - expected)[is_drafted].norm() / expected[is_drafted].norm()
        assert error < 5e-3
        assert torch.equal(bits[name].isfinite(), is_drafted)
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            parts = in_parts(rng, num_slots, length)
            got = logits(compiled, token_ids, table, page_size, parts)
            torch.set_num_threads(1)
            assert torch.equal(got, bits[name]), (name, threads)
    same = [bits[name] for name in BUILDS if name in IN_INTEGERS]
    assert all(torch.equal(each, same[0]) for each in same)

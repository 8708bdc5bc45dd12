"""More ranks than KV heads: several have a copy of the same one, for query heads of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quantised import quantise
from rank_group import JoinedRanks, load, rank_group, whole
from tiny_models import Tiny

from outrider.engine.models.shares import Share

SIZE = 4
# Of two KV heads.
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2}
HYBRID = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[JoinedRanks]:
    with rank_group(SIZE) as group:
        yield group


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("olmo2", {}),  # norms over all heads
        pytest.param("qwen2", {}, marks=pytest.mark.deep),  # biases
        pytest.param("phi3", {}, marks=pytest.mark.deep),  # q, k and v as one layer
        # Gates, head norms, delta nets, experts
        pytest.param("qwen3_5_moe_text", HYBRID, marks=pytest.mark.deep),
    ],
)
def test_ranks_compute_what_one_process_does(
    architecture: str, sizes: dict[str, object], tiny_model: Tiny, ranks: JoinedRanks
) -> None:
    path = tiny_model(architecture, seed=1, **SIZES, **sizes)
    ours, theirs = ranks.run(str(path)), whole(path)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.deep
def test_ranks_copy_quantised_kv_heads(
    tiny_model: Tiny, tmp_path: Path, ranks: JoinedRanks
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    path = quantise(tiny_model("qwen3", scale=0.1, **SIZES, **sizes), tmp_path, "awq")
    ours, theirs = ranks.run(str(path)), whole(path)
    assert (ours.logits - theirs.logits).norm() < 1e-4 * theirs.logits.norm()


def test_a_rank_keeps_the_kv_head_of_its_query_heads(tiny_model: Tiny) -> None:
    path = str(tiny_model("qwen2", **SIZES))
    decoder = load(path)
    keys = decoder.blocks[0].parts[0].linears["qkv"].weight.dequantised()[8 * 4 : 10 * 4]
    bytes_per_token = decoder.bytes_per_token(decoder.attentions[0])
    for rank in range(SIZE):
        share = load(path, Share(rank, SIZE))
        own = share.blocks[0].parts[0].linears["qkv"].weight.dequantised()[2 * 4 : 3 * 4]
        assert torch.equal(own, keys[rank // 2 * 4 :][:4])
        assert share.bytes_per_token(share.attentions[0]) == bytes_per_token // 2

"""Loading takes what is kept, and a layer on its way: never the whole model in 16 bits."""

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import quantise, quantise_experts
from tiny_models import DEVICE, Tiny
from torch.utils._python_dispatch import TorchDispatchMode
from verification import HAS_KERNELS

from outrider.engine.config import ModelConfig
from outrider.engine.models.loading import load_network
from outrider.engine.models.shares import WHOLE, Share

NUM_LAYERS = 8
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "scale": 0.1,
}
LAYER = 4 * 128 * 128 + 3 * 128 * 256  # weights
OTHERS = 2 * 97 * 128  # embedding and head


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made since and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._num_tensors: Counter[int] = Counter()  # by the address of their storage

    def _forget(self, address: int, num_bytes: int) -> None:
        self._num_tensors[address] -= 1
        if self._num_tensors[address] == 0:
            self.now -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE.type:
                storage = tensor.untyped_storage()
                address, num_bytes = storage.data_ptr(), storage.nbytes()
                if self._num_tensors[address] == 0:
                    self.now += num_bytes
                self._num_tensors[address] += 1
                weakref.finalize(tensor, self._forget, address, num_bytes)
        self.most = max(self.most, self.now)
        return out


@pytest.mark.parametrize("name", [None, "fp8 of blocks", "gptq, act-order"])
def test_no_more_than_a_layer_is_on_its_way(
    name: str | None, tiny_model: Tiny, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    path = tiny_model("llama", **SHAPE)
    config = ModelConfig(path=str(path), dtype="float32", quantization="fp8")
    if name is not None:
        path = quantise(path, tmp_path, name)
        config = ModelConfig(path=str(path), dtype="float32")
    with Memory() as memory:
        network = load_network(config, DEVICE)
        kept = memory.now
    weights = NUM_LAYERS * LAYER + OTHERS
    assert kept >= network.weight_bytes  # it counts
    assert kept <= (1.3 * NUM_LAYERS * LAYER + 4 * OTHERS if HAS_KERNELS else 4.1 * weights)
    assert memory.most - kept < 3 * 4 * LAYER


@pytest.mark.parametrize("name", [None, "awq"])
def test_a_rank_never_has_more_than_its_share_and_a_layer(
    name: str | None, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Though it compares its share with transformers' own code."""
    torch.manual_seed(0)
    path = tiny_model("llama", **SHAPE)
    if name is not None:
        path = quantise(path, tmp_path, name)
    config = ModelConfig(path=str(path), dtype="float32")
    kept, most = [], []
    for share in (WHOLE, Share(1, 2)):
        with Memory() as memory:
            network = load_network(config, DEVICE, share=share)
            kept.append(memory.now)
        most.append(memory.most)
        assert kept[-1] >= network.weight_bytes
        del network
    assert kept[1] < 0.6 * kept[0]
    assert most[1] - kept[1] < 4 * LAYER < most[0] - kept[1]


def test_no_more_than_a_layer_of_experts_is_on_its_way(tiny_model: Tiny, tmp_path: Path) -> None:
    torch.manual_seed(0)
    num_experts, width = 8, 64
    shape = {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": NUM_LAYERS,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "scale": 0.1,
    }
    path = quantise_experts(tiny_model("gpt_oss", **shape), tmp_path)
    with Memory() as memory:
        network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
        kept = memory.now
    experts = num_experts * 3 * width * width  # weights of a layer
    others = network.weight_bytes + 4 * 97 * width  # and the embedding
    assert kept >= NUM_LAYERS * experts / 2  # it counts
    assert kept < NUM_LAYERS * experts * 0.7 + others
    # The proof unpacks a layer for transformers' own code.
    assert memory.most - kept < 3 * 4 * experts

"""The models of tests' engines are compared with transformers' code once a process, not once an
engine: that takes most of the time in which a tiny model is loaded.

What loads them with `load_network` itself always compares, as do the first loads here. So a wrong
decoder is still found, and a model whose files have changed is another one. One that is saved anew,
as many tests save the same, is not. Products with packed weights are compared once a shape.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DEVICE
from transformers import AutoModelForCausalLM

from outrider.engine.models import batch_invariance, loading, pair
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network
from outrider.kernels.model import packed_linear
from outrider.kernels.model.packed_linear import PackedWeight, _agrees

_MUCH_BYTES = 2**20  # no tiny model's file is as large


class _AlreadyCompared:
    """In place of transformers' model."""

    def __init__(self, config: Any, *_: object) -> None:
        self.model = AutoModelForCausalLM._model_mapping[type(config)]

    def fill(self, checkpoint: object) -> None:
        pass


def prove_once() -> None:
    proven: set[object] = set()

    def load(config: Any, device: torch.device, *report: Any, **options: Any) -> Any:
        files = [_contents(file) for file in sorted(Path(config.path).glob("*"))]
        key = repr((replace(config, path=""), device, sorted(options.items()), files))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_linear, "_agrees", agrees)
            if key in proven:
                patch.setattr(loading, "Original", _AlreadyCompared)
                patch.setattr(loading, "why_different", lambda *_, **__: None)
                patch.setattr(batch_invariance, "_prove", _choose_attention)
            network = load_network(config, device, *report, **options)
        if isinstance(network, Decoder):
            proven.add(key)
        return network

    agreed: set[object] = set()

    def agrees(packed: PackedWeight, weight: torch.Tensor, num_rows: int) -> bool:
        key = weight.shape, weight.dtype, packed.blocks, num_rows
        if key not in agreed and _agrees(packed, weight, num_rows):
            agreed.add(key)
        return key in agreed

    if DEVICE.type == "cpu":  # a GPU compiles kernels while it compares
        pair.load_network = load


def _contents(file: Path) -> tuple[str, object]:
    """The file's name, and what changes with what it holds."""
    stat = file.stat()
    if file.is_dir() or stat.st_size > _MUCH_BYTES:
        return str(file), stat.st_mtime_ns
    return file.name, hashlib.sha256(file.read_bytes()).digest()


def _choose_attention(network: Any, *_: object) -> None:
    """What a proof decides of a network that it finds batch-invariant."""
    if not network.attention_is_batch_invariant:
        batch_invariance._prove_attention(network)

"""The models of tests' engines are compared with transformers' code once a process, not once an
engine: that takes most of the time in which a tiny model is loaded.

What loads them with `load_network` itself always compares, as do the first loads here. So a wrong
decoder is still found, and a model whose files have changed is another one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DEVICE
from transformers import AutoModelForCausalLM

from outrider.engine.models import batch_invariance, loading, pair
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network


class _AlreadyCompared:
    """In place of transformers' model."""

    def __init__(self, config: Any, *_: object) -> None:
        self.model = AutoModelForCausalLM._model_mapping[type(config)]

    def fill(self, checkpoint: object) -> None:
        pass


def prove_once() -> None:
    proven: set[object] = set()

    def load(config: Any, device: torch.device, *report: Any, **options: Any) -> Any:
        files = [(file, file.stat().st_mtime_ns) for file in sorted(Path(config.path).glob("*"))]
        key = repr((config, device, sorted(options.items()), files))
        if key in proven:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loading, "Original", _AlreadyCompared)
                patch.setattr(loading, "why_different", lambda *_, **__: None)
                patch.setattr(batch_invariance, "_prove", _choose_attention)
                return load_network(config, device, *report, **options)
        network = load_network(config, device, *report, **options)
        if isinstance(network, Decoder):
            proven.add(key)
        return network

    if DEVICE.type == "cpu":  # a GPU compiles kernels while it compares
        pair.load_network = load


def _choose_attention(network: Any) -> None:
    """What a proof decides of a network that it finds batch-invariant."""
    if not network.attention_is_batch_invariant:
        batch_invariance._prove_attention(network)

"""A causal LM whose decoder layers are all fused, run without its own code around them.

What transformers does between the layers and around the model (configurations merged, masks asked
for, outputs wrapped) takes a small draft on a CPU as long as one of its layers, at every pass.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.attention import LayerSpec, PagedContext, attention_context
from outrider.engine.fused_layers import FusedLayer, FusedNorm, FusedRotary, one_prompt
from outrider.engine.model_loader import run_model

log = logging.getLogger(__name__)

# (input_ids [T], positions [T], logits_rows [N]) -> logits [N, V]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]

_NUM_CHECKED_ROWS = 5
# Layers that one thread computes before another is awake, which takes some 30 us each time.
_MAX_LONE_ROWS, _MAX_LONE_WEIGHTS = 4, 1 << 21


class FusedModel:
    """Embedding, fused layers, norm and head."""

    def __init__(self, model: Any, layers: list[FusedLayer]) -> None:
        decoder = model.get_decoder()
        self._embed = model.get_input_embeddings()
        self._rotary = decoder.rotary_emb
        self._layers = layers
        self._norm = decoder.norm
        self._head = model.get_output_embeddings()
        self._is_small = max(layer.num_weights for layer in layers) <= _MAX_LONE_WEIGHTS

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        hidden_states = self._embed(input_ids[None])
        position_embeddings = self._rotary(hidden_states, positions[None])
        is_short = self._is_small and len(input_ids) <= _MAX_LONE_ROWS
        with _one_thread() if is_short else nullcontext():
            for layer in self._layers:
                hidden_states = layer(hidden_states, position_embeddings=position_embeddings)
        logits: Tensor = self._head(self._norm(hidden_states[:, logits_rows]))[0]
        return logits


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def fuse_model(model: PreTrainedModel, specs: list[LayerSpec]) -> Run:
    """The whole forward pass: on a CPU without the model's own code where that does the same."""
    own = partial(run_model, model)
    if model.device.type != "cpu":  # a GPU replays its launches: what is around them costs nothing
        return own
    fused_parts = [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]
    layers = [part for part in fused_parts if isinstance(part, FusedLayer)]
    known = (FusedLayer, FusedNorm, FusedRotary)
    if len(layers) < len(specs) or not all(isinstance(part, known) for part in fused_parts):
        return own
    if not hasattr(model.get_decoder(), "norm"):
        return own
    fused = FusedModel(model, layers)
    return fused if _agrees(own, fused, model.device) else own


@torch.inference_mode()
def _agrees(own: Run, fused: Run, device: torch.device) -> bool:
    """Whether both give the same logits, over the caches that the layers were checked with."""
    positions = torch.arange(_NUM_CHECKED_ROWS, device=device)
    input_ids = torch.zeros_like(positions)
    with attention_context(PagedContext(one_prompt(positions))):
        expected = own(input_ids, positions, positions[2:]).float()
        got = fused(input_ids, positions, positions[2:]).float()
    return bool((got - expected).norm() <= 1e-3 * expected.norm())

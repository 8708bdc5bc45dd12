"""Phi-3 and Phi-4: a Llama whose checkpoints have q, k and v as one layer, and gate and up too."""

from typing import Any

from outrider.kernels.model.rms_norm import Norm

from ..parts.attention import Attention
from ..parts.base import Part
from .llama import Llama


class Phi3(Llama):
    """Those whose RoPE is stretched, or leaves dimensions out, are left to transformers."""

    model_types = ("phi3",)
    fields = Llama.fields | {"original_max_position_embeddings", "sliding_window"}

    def mixer(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Attention:
        return super().mixer(name, norm, layer, fused=True, **options)

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        return super().mlp(name, norm, layer, fused="gate_up_proj", **options)

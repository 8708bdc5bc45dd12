"""Qwen3's mixtures: a Qwen3 whose MLPs, in most layers, are experts:

    x += sum over the experts e of a row:  weight_e * down_e(silu(gate_e(m)) * up_e(m))
    m = post_attention_layernorm(x)

A router chooses the experts with the largest logits. Their weights are a softmax over these logits
or, without `norm_topk_prob`, their shares of a softmax over all.
"""

from typing import Any, ClassVar

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Router

from ..expert_weights import SharedExpert
from ..parts.base import Part
from .llama import Windowed


class Qwen3Moe(Windowed):
    """Layers of `mlp_only_layers`, and those that `decoder_sparse_step` leaves out, are dense."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    fields = Windowed.fields | {
        "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
        "num_experts", "num_experts_per_tok",
    }  # fmt: skip

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        config = self.config
        is_sparse = (layer + 1) % config.decoder_sparse_step == 0
        if layer in config.mlp_only_layers or config.num_experts == 0 or not is_sparse:
            return super().mlp(name, norm, layer, **options)
        router = Router(config.num_experts_per_tok, over_all=not config.norm_topk_prob)
        num_experts, inner = config.num_experts, config.moe_intermediate_size
        shared = self.shared_expert(name)
        return self.experts(name, norm, router, num_experts, inner, shared=shared)

    def shared_expert(self, name: str) -> SharedExpert | None:
        return None

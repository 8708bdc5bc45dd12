"""GLM 4.5 to 4.7: a Llama whose MLPs are experts, but for the first layers, and one that all share:

    x += sum over the experts e of a row:  weight_e * expert_e(m)  +  shared_experts(m)
    expert(m) = down(silu(gate(m)) * up(m)),  m = post_attention_layernorm(x)

A row chooses experts by sigmoids plus a bias, from the best groups of them. The router computes in
float32. RoPE rotates the first dimensions of a head.
"""

from typing import Any

from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from outrider.kernels.model.rms_norm import Norm

from ..blocks import Block
from ..expert_weights import SharedExpert
from ..parts.base import Part
from .llama import SIGMOIDS, Llama


class Glm4Moe(Llama):
    """Its layer for multi-token prediction, behind the last, is a head and no part of it."""

    model_types = ("glm4_moe",)
    fields = Llama.fields | {
        "first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts",
        "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_mtp_layers",
        "num_nextn_predict_layers", "routed_scaling_factor", "topk_group", "use_qk_norm",
    }  # fmt: skip
    fixed = SIGMOIDS
    rope_fields = frozenset({"partial_rotary_factor"})
    rotary = Glm4MoeRotaryEmbedding

    def mtp_block(self, name: str) -> Block:
        return self.block(name, self.config.num_hidden_layers)

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        config = self.config
        if layer < config.first_k_dense_replace:
            return super().mlp(name, norm, layer, **options)
        num_experts, inner = config.n_routed_experts, config.moe_intermediate_size
        router = self.sigmoid_router(name, num_experts)
        shared = SharedExpert(f"{name}.shared_experts", inner * config.n_shared_experts)
        return self.experts(name, norm, router, num_experts, inner, exact=True, shared=shared)

"""OLMoE: a Llama with norms over all heads together, whose MLPs are experts:

x += sum over the experts e of a row:  weight_e * down_e(silu(gate_e(m)) * up_e(m))
m = post_attention_layernorm(x)
"""

from typing import Any

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Router

from ..parts.attention import Attention
from ..parts.base import Part
from .llama import Llama


class Olmoe(Llama):
    """Those that clip q, k and v are left to transformers."""

    model_types = ("olmoe",)
    fields = Llama.fields | {"norm_topk_prob", "num_experts", "num_experts_per_tok"}

    def mixer(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Attention:
        return super().mixer(name, norm, layer, wide=True, **options)

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        config = self.config
        router = Router(config.num_experts_per_tok, over_all=not config.norm_topk_prob)
        return self.experts(name, norm, router, config.num_experts, config.intermediate_size)

"""Mixtral: a Mistral whose MLPs are experts, with weights of a softmax over a row's own:

x += sum over the experts e of a row:  weight_e * down_e(silu(gate_e(m)) * up_e(m))
m = post_attention_layernorm(x)
"""

from typing import Any, ClassVar

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Router

from ..parts.base import Part
from .llama import Llama


class Mixtral(Llama):
    model_types = ("mixtral",)
    fields = Llama.fields | {
        "num_experts_per_tok", "num_local_experts", "sliding_window"
    }  # fmt: skip
    renamed: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    }

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        config, router = self.config, Router(self.config.num_experts_per_tok)
        return self.experts(name, norm, router, config.num_local_experts, config.intermediate_size)

"""Granite's mixtures: a Mixtral with four factors:

x = embedding_multiplier * E[token]
x += residual_multiplier * attention(n),  of scores times attention_multiplier
x += residual_multiplier * (sum over the experts e of a row:  weight_e * expert_e(m))
logits = lm_head(norm(x)) / logits_scaling
"""

from dataclasses import replace
from typing import Any, ClassVar

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Router

from ..blocks import Block
from ..decoder import Decoder
from ..parts.attention import Attention
from ..parts.base import Part
from .llama import Llama


class GraniteMoe(Llama):
    model_types: ClassVar[tuple[str, ...]] = ("granitemoe",)
    fields = Llama.fields | {
        "attention_multiplier", "embedding_multiplier", "logits_scaling", "num_experts_per_tok",
        "num_local_experts", "residual_multiplier",
    }  # fmt: skip
    renamed: ClassVar[dict[str, str]] = {
        "moe.input_linear.weight": "moe.experts.gate_up_proj",
        "moe.output_linear.weight": "moe.experts.down_proj",
        "moe.router.layer.": "moe.router.",
    }

    def block(self, name: str, layer: int) -> Block:
        return Block(
            self.mixer(f"{name}.self_attn", self.norm(f"{name}.input_layernorm"), layer),
            self.mlp(
                f"{name}.block_sparse_moe", self.norm(f"{name}.post_attention_layernorm"), layer
            ),
        )

    def mixer(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Attention:
        config = self.config
        part = super().mixer(name, norm, layer, scale=config.attention_multiplier, **options)
        return replace(part, factor=config.residual_multiplier)

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        config, router = self.config, Router(self.config.num_experts_per_tok)
        num_experts, inner = config.num_local_experts, config.intermediate_size
        part = self.experts(name, norm, router, num_experts, inner, gate="router", **options)
        return replace(part, factor=config.residual_multiplier)

    def decoder(self) -> Decoder:
        decoder = super().decoder()
        decoder.embedding_factor = self.config.embedding_multiplier
        decoder.logits_divisor = self.config.logits_scaling
        return decoder

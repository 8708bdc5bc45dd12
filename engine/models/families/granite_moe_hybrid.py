"""Granite 4's hybrids: a Granite mixture of which most layers are Mamba2, with an MLP that all rows
share:

x += residual_multiplier * (mamba2(n), or attention(n)),                n = input_layernorm(x)
x += residual_multiplier * (sum over the experts of a row + shared_mlp(m))

The small ones have no experts, and most have no RoPE.
"""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from outrider.kernels.model.rms_norm import Norm

from ..attention import Rope
from ..blocks import Block
from ..expert_weights import SharedExpert
from ..parts.base import Part
from ..parts.gated_mlp import GatedMLP
from ..parts.mamba2 import Mamba2
from .granite_moe import GraniteMoe


class GraniteMoeHybrid(GraniteMoe):
    model_types: ClassVar[tuple[str, ...]] = ("granitemoehybrid",)
    fields = GraniteMoe.fields | {
        "layer_types", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state",
        "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "position_embedding_type",
        "shared_intermediate_size", "time_step_limit",
    }  # fmt: skip
    # How transformers computes it, and what follows from heads.
    neutral = frozenset({"mamba_chunk_size", "mamba_expand"})
    per_rank = GraniteMoe.per_rank | {
        "mamba_expand", "mamba_n_groups", "mamba_n_heads", "shared_intermediate_size"
    }  # fmt: skip
    layer_types = frozenset({"full_attention", "linear_attention"})

    @classmethod
    def why_unknown(cls, config: PreTrainedConfig) -> str | None:
        heads, groups = config.mamba_n_heads, config.mamba_n_groups
        reason = super().why_unknown(config)
        return reason or Mamba2.why_impossible(heads, groups, config.time_step_limit)

    def rope_of(self, layer: int) -> Rope:
        return self.rope if self.config.position_embedding_type == "rope" else self.no_rope

    def block(self, name: str, layer: int) -> Block:
        norm = self.norm(f"{name}.input_layernorm")
        is_mamba2 = self.config.layer_types[layer] == "linear_attention"
        return Block(
            self.mamba2(f"{name}.mamba", norm)
            if is_mamba2
            else self.mixer(f"{name}.self_attn", norm, layer),
            self.mlp(name, self.norm(f"{name}.post_attention_layernorm"), layer),
        )

    def mamba2(self, name: str, norm: Norm) -> Mamba2:
        config = self.config
        return Mamba2.read(
            self.tensors,
            name,
            norm=norm,
            width=config.hidden_size,
            num_heads=config.mamba_n_heads,
            num_groups=config.mamba_n_groups,
            head_dim=config.mamba_d_head,
            state_size=config.mamba_d_state,
            num_taps=config.mamba_d_conv,
            factor=config.residual_multiplier,
        )

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        """That of a whole block, which begins with `name`."""
        config, shared_mlp = self.config, f"{name}.shared_mlp"
        inner, fused, down = config.shared_intermediate_size, "input_linear", "output_linear"
        if config.num_local_experts:
            shared = SharedExpert(shared_mlp, inner, fused=fused, down=down)
            return super().mlp(f"{name}.block_sparse_moe", norm, layer, shared=shared)
        return GatedMLP.read(
            self.tensors,
            shared_mlp,
            norm=norm,
            width=config.hidden_size,
            inner=inner,
            fused=fused,
            down=down,
            factor=config.residual_multiplier,
        )

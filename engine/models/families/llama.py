"""Llama, and the families whose layers are the same:

    x += o_proj(attention(rope(q_proj(n)), rope(k_proj(n)), v_proj(n))),  n = input_layernorm(x)
    x += down_proj(silu(gate_proj(m)) * up_proj(m)),                 m = post_attention_layernorm(x)

Some have biases, or norms of heads; they are read if the checkpoint has them. In some, layers
attend to a window, or have no RoPE.
"""

from typing import Any, ClassVar

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Router

from ..attention import Rope
from ..blocks import Block
from ..parts.attention import Attention
from ..parts.base import Part
from ..parts.experts import ExpertMLP
from ..parts.gated_mlp import GatedMLP
from .base import Family, window_of

# Of those with `Llama.sigmoid_router`.
SIGMOIDS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


class Llama(Family):
    """All layers attend to all tokens, unless a subclass implements fields of windows."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def block(self, name: str, layer: int) -> Block:
        return Block(
            self.mixer(f"{name}.self_attn", self.norm(f"{name}.input_layernorm"), layer),
            self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm"), layer),
        )

    def mixer(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Attention:
        """`options` as in Attention.read."""
        config = self.config
        return Attention.read(
            self.tensors,
            name,
            norm=norm,
            eps=config.rms_norm_eps,
            rope=self.rope_of(layer),
            width=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            kv_copies=self.kv_copies,
            head_dim=config.head_dim,
            **{"window": window_of(config, layer)} | options,
        )

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        """`options` as in GatedMLP.read."""
        width, inner = self.config.hidden_size, self.config.intermediate_size
        return GatedMLP.read(self.tensors, name, norm=norm, width=width, inner=inner, **options)

    def experts(
        self,
        name: str,
        norm: Norm | None,
        router: Router,
        num_experts: int,
        inner: int,
        **options: Any,
    ) -> ExpertMLP:
        """In place of an MLP; `options` as in ExpertMLP.read."""
        return ExpertMLP.read(
            self.tensors,
            name,
            norm=norm,
            width=self.config.hidden_size,
            inner=inner,
            num_experts=num_experts,
            router=router,
            **options,
        )

    def sigmoid_router(self, name: str, num_experts: int) -> Router:
        """Of sigmoids plus a bias, as DeepSeek's."""
        config = self.config
        return Router(
            config.num_experts_per_tok,
            over_all=not config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            sigmoid=True,
            bias=self.tensors.float32(f"{name}.gate.e_score_correction_bias", num_experts),
            num_groups=config.n_group,
            top_groups=config.topk_group,
        )

    def rope_of(self, layer: int) -> Rope:
        return self.rope


class SeedOss(Llama):
    """Its output projections have a switch of their own for biases."""

    model_types = ("seed_oss",)
    fields = Llama.fields | {"attention_out_bias"}


class Windowed(Llama):
    """Layers may attend to a window: all of them, or those that `layer_types` names."""

    model_types: ClassVar[tuple[str, ...]] = (
        "cwm",
        "mimo",
        "ministral",
        "mistral",
        "qwen2",
        "qwen3",
    )
    fields = Llama.fields | {
        "layer_types", "max_window_layers", "sliding_window", "use_sliding_window"
    }  # fmt: skip


class SmolLM3(Windowed):
    """Some layers have no RoPE."""

    model_types = ("smollm3",)
    fields = Windowed.fields | {"no_rope_layer_interval", "no_rope_layers"}

    def rope_of(self, layer: int) -> Rope:
        return self.rope if self.config.no_rope_layers[layer] else self.no_rope

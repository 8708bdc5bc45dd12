"""Qwen3-Next, Qwen3.5 and 3.6: most layers are gated delta nets, some are gated attention:

    x += delta_net(n),  or  o_proj(attention(rope(q), rope(k), v) sigmoid(gate)),
                                                                  n = input_layernorm(x)
    x += mlp(m),                                                  m = post_attention_layernorm(x)

In mixtures, mlp is a sum over experts; see qwen2_moe.py. All norms but those of the delta nets
multiply by 1 + w. RoPE rotates the first quarter of a head.
"""

from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from outrider.kernels.model.rms_norm import Norm

from ..blocks import Block
from ..parts.delta_net import DeltaNet
from .llama import Llama
from .qwen2_moe import Qwen2Moe


class Hybrid(Llama):
    """`layer_types` says which layers are delta nets."""

    fields = Llama.fields | {
        "layer_types", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "linear_value_head_dim",
    }  # fmt: skip
    layer_types = frozenset({"full_attention", "linear_attention"})
    # Positions of text are the same in all sections of RoPE.
    rope_fields = frozenset({"mrope_interleaved", "mrope_section", "partial_rotary_factor"})
    rotary = Qwen3NextRotaryEmbedding
    by_key_head: ClassVar[bool]  # whether a delta net's inputs are stored so

    @classmethod
    def why_unknown(cls, config: PreTrainedConfig) -> str | None:
        if getattr(config, "attn_output_gate", True) is False:
            return "its attention has no gate"
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        if min(keys, config.linear_key_head_dim, config.linear_value_head_dim) < 1:
            return "its delta nets have heads of no size, or none"
        if values % keys:
            return f"{values} value heads cannot share {keys} key heads"
        return super().why_unknown(config)

    def block(self, name: str, layer: int) -> Block:
        norm = self.norm(f"{name}.input_layernorm")
        is_delta_net = self.config.layer_types[layer] == "linear_attention"
        return Block(
            self.delta_net(f"{name}.linear_attn", norm)
            if is_delta_net
            else self.mixer(f"{name}.self_attn", norm, layer, gated=True, norms_add_one=True),
            self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm"), layer),
        )

    def mtp_block(self, name: str) -> Block:
        return self.block(name, self.config.layer_types.index("full_attention"))

    def delta_net(self, name: str, norm: Norm) -> DeltaNet:
        config = self.config
        return DeltaNet.read(
            self.tensors,
            name,
            norm=norm,
            width=config.hidden_size,
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            num_taps=config.linear_conv_kernel_dim,
            by_key_head=self.by_key_head,
        )

    def norm(self, name: str, size: int | None = None) -> Norm:
        config = self.config
        size = size or config.hidden_size
        return self.tensors.norm(name, size, config.rms_norm_eps, adds_one=True)


class Mixture(Hybrid, Qwen2Moe):
    """Its MLPs are experts, as in Qwen2's mixtures."""

    fields = Hybrid.fields | Qwen2Moe.fields


class Qwen3_5(Hybrid):
    """The text of a multimodal model."""

    model_types = ("qwen3_5_text",)
    by_key_head = False


class Qwen3_5Moe(Mixture):
    """The text of a multimodal mixture. All of its layers have experts."""

    model_types = ("qwen3_5_moe_text",)
    by_key_head = False
    fixed: ClassVar[dict[str, Any]] = {
        **Mixture.fixed, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True
    }  # fmt: skip


class Qwen3Next(Mixture):
    model_types = ("qwen3_next",)
    by_key_head = True

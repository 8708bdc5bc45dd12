"""Nemotron-H and Nemotron 3: each layer is one mixer, one of four kinds:

    x += mixer(norm(x)),  Mamba2, attention without RoPE, a sum over experts, or an MLP
    mlp(n) = down(max(up(n), 0)^2),  as experts are

A row chooses experts by sigmoids plus a bias, as in GLM; see glm4_moe.py. Those of the large models
compute in a smaller space.
"""

import copy
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from outrider.kernels.model.expert_matrix import RELU_SQUARED
from outrider.kernels.model.rms_norm import Norm

from ..attention import Rope
from ..blocks import Block
from ..checkpoint import AnyCheckpoint
from ..expert_weights import SharedExpert
from ..parts.base import Part
from ..parts.mamba2 import Mamba2
from ..parts.plain_mlp import PlainMLP
from .llama import SIGMOIDS, Llama

_NO_TIME = 1e-30  # transformers takes its logarithm


class NemotronH(Llama):
    """Its layers for multi-token prediction, behind the last, are not read."""

    model_types = ("nemotron_h",)
    fields = Llama.fields | {
        "conv_kernel", "layer_norm_epsilon", "layers_block_type", "mamba_head_dim",
        "mamba_hidden_act", "mamba_num_heads", "mamba_ssm_cache_dtype", "mlp_hidden_act",
        "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size",
        "n_group", "n_groups", "n_routed_experts", "norm_topk_prob", "num_experts_per_tok",
        "routed_scaling_factor", "ssm_state_size", "time_step_limit", "topk_group",
        "use_bias", "use_conv_bias",
    }  # fmt: skip
    fixed = SIGMOIDS
    # How transformers computes, initialises and trains it, and what it derives from tensors.
    neutral = frozenset({
        "chunk_size", "expand", "hidden_dropout", "mamba_proj_bias", "moe_shared_expert_overlap",
        "mtp_layers_block_type", "n_shared_experts", "num_logits_to_keep",
        "num_nextn_predict_layers", "rescale_prenorm_residual", "time_step_floor",
        "time_step_max", "time_step_min", "use_mamba_kernels",
    })  # fmt: skip
    per_rank = Llama.per_rank | {
        "mamba_num_heads", "moe_shared_expert_intermediate_size", "n_groups"
    }  # fmt: skip
    layer_types = frozenset({"full_attention", "linear_attention", "mlp", "moe"})
    activations: ClassVar[dict[str, str]] = {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"}
    embedding, last_norm = "model.embeddings", "model.norm_f"
    renamed: ClassVar[dict[str, str]] = {"backbone.": "model."}

    def __init__(self, tensors: AnyCheckpoint, config: Any) -> None:
        super().__init__(tensors, config)
        self.config.rms_norm_eps = self.config.layer_norm_epsilon

    @classmethod
    def why_unknown(cls, config: PreTrainedConfig) -> str | None:
        heads, groups = config.mamba_num_heads, config.n_groups
        reason = Mamba2.why_impossible(heads, groups, config.time_step_limit)
        return reason or super().why_unknown(config)

    @classmethod
    def compared(cls, config: PreTrainedConfig) -> PreTrainedConfig:
        """Without the least time step, which is no limit: see `kernels/model/mamba2.py`."""
        config = copy.deepcopy(config)
        config.time_step_min = _NO_TIME
        return config

    def norm(self, name: str, size: int | None = None) -> Norm:
        norm = super().norm(name, size)
        return norm._replace(weight=norm.weight.float())  # it multiplies before it rounds

    def rope_of(self, layer: int) -> Rope:
        return self.no_rope

    def block(self, name: str, layer: int) -> Block:
        norm, mixer = self.norm(f"{name}.norm"), f"{name}.mixer"
        match self.config.layers_block_type[layer]:
            case "linear_attention":
                return Block(self.mamba2(mixer, norm))
            case "full_attention":
                return Block(self.mixer(mixer, norm, layer))
            case "moe":
                return Block(self.mixture(mixer, norm))
            case _:
                return Block(self.plain_mlp(mixer, norm))

    def mamba2(self, name: str, norm: Norm) -> Mamba2:
        config = self.config
        return Mamba2.read(
            self.tensors,
            name,
            norm=norm,
            width=config.hidden_size,
            num_heads=config.mamba_num_heads,
            num_groups=config.n_groups,
            head_dim=config.mamba_head_dim,
            state_size=config.ssm_state_size,
            num_taps=config.conv_kernel,
        )

    def plain_mlp(self, name: str, norm: Norm) -> PlainMLP:
        width, inner = self.config.hidden_size, self.config.intermediate_size
        return PlainMLP.read(self.tensors, name, norm=norm, width=width, inner=inner)

    def mixture(self, name: str, norm: Norm) -> Part:
        config = self.config
        num_experts, inner = config.n_routed_experts, config.moe_intermediate_size
        router = self.sigmoid_router(name, num_experts)
        shared = SharedExpert(f"{name}.shared_experts", config.moe_shared_expert_intermediate_size)
        size, latent = config.moe_latent_size, None
        if size is not None:
            latent = size, "fc1_latent_proj", "fc2_latent_proj"
        return self.experts(
            name, norm, router, num_experts, inner, exact=True, shared=shared,
            activation=RELU_SQUARED, latent=latent,
        )  # fmt: skip

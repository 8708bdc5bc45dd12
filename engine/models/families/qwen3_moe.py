"""Qwen3's mixtures: a Qwen3 whose MLPs, in most layers, are experts:

    x += sum over the experts e of a row:  weight_e * down_e(silu(gate_e(m)) * up_e(m))
    m = post_attention_layernorm(x)

A router chooses the experts with the largest logits. Their weights are a softmax over these logits
or, without `norm_topk_prob`, their shares of a softmax over all.
"""

from functools import partial
from typing import Any

from outrider.kernels.model.expert_matrix import SILU
from outrider.kernels.model.rms_norm import Norm

from ..parts.base import Part
from ..parts.experts import ExpertMLP, read_experts
from .llama import Windowed


class Qwen3Moe(Windowed):
    """Layers of `mlp_only_layers`, and those that `decoder_sparse_step` leaves out, are dense."""

    model_types = ("qwen3_moe",)
    per_rank = frozenset()  # nothing reads a share of its experts yet
    fields = Windowed.fields | {
        "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
        "num_experts", "num_experts_per_tok",
    }  # fmt: skip

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        config, inner = self.config, self.config.moe_intermediate_size
        width, num_experts, top_k = (
            config.hidden_size, config.num_experts, config.num_experts_per_tok
        )  # fmt: skip
        is_sparse = (layer + 1) % config.decoder_sparse_step == 0
        if layer in config.mlp_only_layers or num_experts == 0 or not is_sparse:
            return super().mlp(name, norm, layer, **options)
        read = partial(
            read_experts, self.tensors, f"{name}.experts", num_experts=num_experts, top_k=top_k
        )
        gate_up = {"gate_proj": inner, "up_proj": inner}
        return ExpertMLP(
            norm=norm,
            router=self.tensors.linear(width, {f"{name}.gate": num_experts}),
            gate_up=read("gate_up_proj", gate_up, num_inputs=width, axis="outputs"),
            down=read("down_proj", {"down_proj": width}, num_inputs=inner, axis="inputs"),
            glu=SILU,
            top_k=top_k,
            over_all=not config.norm_topk_prob,
            chooser=f"{name}.gate",
        )

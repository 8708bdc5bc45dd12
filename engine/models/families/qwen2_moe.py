"""Qwen2's mixtures: those of Qwen3, and an expert that all rows share, with a gate of its own:

x += sum over the experts of a row + sigmoid(shared_expert_gate(m)) * shared_expert(m)
m = post_attention_layernorm(x)
"""

from typing import Any, ClassVar

from ..parts.gated_mlp import GatedMLP
from .qwen3_moe import Qwen3Moe


class Qwen2Moe(Qwen3Moe):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe",)
    fields = Qwen3Moe.fields | {"qkv_bias", "shared_expert_intermediate_size"}

    def shared_expert(self, name: str) -> dict[str, Any]:
        config = self.config
        shared = GatedMLP.read(
            self.tensors,
            f"{name}.shared_expert",
            norm=None,
            width=config.hidden_size,
            inner=config.shared_expert_intermediate_size,
        )
        return {"shared": shared, "shared_gate": "shared_expert_gate"}

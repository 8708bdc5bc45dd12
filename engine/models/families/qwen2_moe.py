"""Qwen2's mixtures: those of Qwen3, and an expert that all rows share, with a gate of its own:

x += sum over the experts of a row + sigmoid(shared_expert_gate(m)) * shared_expert(m)
m = post_attention_layernorm(x)
"""

from typing import ClassVar

from ..expert_weights import SharedExpert
from .qwen3_moe import Qwen3Moe


class Qwen2Moe(Qwen3Moe):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe",)
    fields = Qwen3Moe.fields | {"qkv_bias", "shared_expert_intermediate_size"}

    def shared_expert(self, name: str) -> SharedExpert:
        return SharedExpert(
            f"{name}.shared_expert",
            self.config.shared_expert_intermediate_size,
            gate="shared_expert_gate",
        )

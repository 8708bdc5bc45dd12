"""OLMo 2 and 3: a Llama whose norms lie behind its parts.

    x += post_attention_layernorm(o_proj(attention(rope(q), rope(k), v_proj(x))))
    x += post_feedforward_layernorm(mlp(x))

q and k are normalised over all heads together. In OLMo 3 most layers attend to a window, with a
RoPE of their own.
"""

from typing import Any, ClassVar

from outrider.kernels.model.rms_norm import Norm

from ..attention import Rope
from ..parts.attention import Attention
from .exaone4 import NormsBehind


class Olmo2(NormsBehind):
    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)

    def mixer(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Attention:
        return super().mixer(name, norm, layer, wide=True, **options)


class Olmo3(Olmo2):
    model_types = ("olmo3",)
    fields = Olmo2.fields | {"layer_types", "sliding_window"}

    def rope_of(self, layer: int) -> Rope:
        return self.ropes[self.config.layer_types[layer]]

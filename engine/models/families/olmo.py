"""OLMo 2 and 3: a Llama whose norms lie behind its parts.

    x += post_attention_layernorm(o_proj(attention(rope(q), rope(k), v_proj(x))))
    x += post_feedforward_layernorm(mlp(x))

q and k are normalised over all heads together. In OLMo 3 most layers attend to a window, with a
RoPE of their own.
"""

from ..attention import Rope
from ..blocks import Block
from .llama import Llama


class Olmo2(Llama):
    model_types = ("olmo2",)

    def block(self, name: str, layer: int) -> Block:
        behind_mixer = self.norm(f"{name}.post_attention_layernorm")
        behind_mlp = self.norm(f"{name}.post_feedforward_layernorm")
        return Block(
            self.mixer(f"{name}.self_attn", None, layer, wide=True, post_norm=behind_mixer),
            self.mlp(f"{name}.mlp", None, layer, post_norm=behind_mlp),
        )


class Olmo3(Olmo2):
    model_types = ("olmo3",)
    fields = Olmo2.fields | {"layer_types", "sliding_window"}

    def rope_of(self, layer: int) -> Rope:
        return self.ropes[self.config.layer_types[layer]]

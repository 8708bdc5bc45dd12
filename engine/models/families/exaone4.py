"""EXAONE 4: a Llama whose norms lie behind its parts, with norms of each query and key head.

    x += post_attention_layernorm(o_proj(attention(rope(q_norm(q)), rope(k_norm(k)), v_proj(x))))
    x += post_feedforward_layernorm(mlp(x))

In the large ones most layers attend to a window, and those that attend to all have no RoPE.
"""

from ..attention import Rope
from ..blocks import Block
from .llama import Llama


class NormsBehind(Llama):
    """Norms lie behind its parts."""

    def block(self, name: str, layer: int) -> Block:
        behind_mixer = self.norm(f"{name}.post_attention_layernorm")
        behind_mlp = self.norm(f"{name}.post_feedforward_layernorm")
        return Block(
            self.mixer(f"{name}.self_attn", None, layer, post_norm=behind_mixer),
            self.mlp(f"{name}.mlp", None, layer, post_norm=behind_mlp),
        )


class Exaone4(NormsBehind):
    model_types = ("exaone4",)
    fields = Llama.fields | {"layer_types", "sliding_window", "sliding_window_pattern"}

    def rope_of(self, layer: int) -> Rope:
        config = self.config
        is_full = config.layer_types[layer] == "full_attention"
        return self.no_rope if is_full and config.sliding_window is not None else self.rope

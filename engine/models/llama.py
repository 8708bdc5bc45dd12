"""Reads layers of Llama's form and names: attention with RoPE, then a gated MLP."""

import math
from typing import Any

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.kernels.model.rms_norm import Norm

from .attention import PagedAttention, Rope
from .blocks import AttentionMixer, Block, GatedMLP
from .checkpoint import AnyCheckpoint, check_shape
from .experts import ExpertMLP

# What checkpoints call what keys and values in FP8 are multiplied by; the last is of both.
_KV_SCALES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")


class LlamaReader:
    """Reads the parts of a model."""

    def __init__(self, checkpoint: AnyCheckpoint, config: Any) -> None:
        """`config` has the fields of a Llama's."""
        self.checkpoint = checkpoint
        self._config = config

    def norm(self, name: str, size: int | None = None) -> Norm:
        """Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape."""
        weight = self.checkpoint.tensor(f"{name}.weight")
        check_shape(f"{name}.weight", weight.shape, (size or self._config.hidden_size,))
        return Norm(weight, self._config.rms_norm_eps)

    def rope(self) -> Rope:
        """One for all layers, which then share its cosines and sines."""
        rotary = LlamaRotaryEmbedding(self._config)
        return Rope(rotary.inv_freq.float().to(self.checkpoint.device), rotary.attention_scaling)

    def block(
        self,
        name: str,
        rope: Rope,
        *,
        window: int | None,
        input_width: int | None = None,
        input_norm: str = "input_layernorm",
        causal: bool = True,
    ) -> Block:
        """A layer, with those head norms, biases, sinks and scales of KV that the checkpoint has.

        Its attention reads `input_width` numbers, if that is not the hidden size. Raises KeyError
        naming a tensor that is missing, ValueError naming a wrong shape.
        """
        config = self._config
        attention, width = f"{name}.self_attn", config.hidden_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or width // heads
        has_head_norms = f"{attention}.q_norm.weight" in self.checkpoint
        sinks = f"{attention}.sinks"
        mixer = AttentionMixer(
            norm=self.norm(f"{name}.{input_norm}"),
            qkv=self.checkpoint.linear(
                input_width or width,
                **{
                    f"{attention}.q_proj": heads * head_dim,
                    f"{attention}.k_proj": kv_heads * head_dim,
                    f"{attention}.v_proj": kv_heads * head_dim,
                },
            ),
            output=self.checkpoint.linear(heads * head_dim, **{f"{attention}.o_proj": width}),
            attention=PagedAttention(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=head_dim,
                scale=head_dim**-0.5,
                window=window,
                sinks=self.checkpoint.tensor(sinks) if sinks in self.checkpoint else None,
                k_scale=self._kv_scale(attention, "k"),
                v_scale=self._kv_scale(attention, "v"),
                causal=causal,
            ),
            rope=rope,
            head_norms=(
                self.norm(f"{attention}.q_norm", head_dim),
                self.norm(f"{attention}.k_norm", head_dim),
            )
            if has_head_norms
            else None,
        )
        return Block(mixer, self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm")))

    def mlp(self, name: str, norm: Norm) -> GatedMLP | ExpertMLP:
        """The second part of a layer. Raises as `block` does."""
        width, inner = self._config.hidden_size, self._config.intermediate_size
        linear = self.checkpoint.linear
        return GatedMLP(
            norm=norm,
            gate_up=linear(width, **{f"{name}.gate_proj": inner, f"{name}.up_proj": inner}),
            down=linear(inner, **{f"{name}.down_proj": width}),
        )

    def _kv_scale(self, attention: str, which: str) -> float:
        """The scale of keys ("k") or values ("v") in pages of FP8; 1 if the checkpoint has none.

        Raises ValueError if heads have scales of their own, or the scale is no positive number.
        """
        names = [f"{attention}.{name.format(which)}" for name in _KV_SCALES]
        name = next((name for name in names if name in self.checkpoint), None)
        if name is None:
            return 1.0
        scale = self.checkpoint.stored(name)
        if scale.numel() != 1:
            raise ValueError(f"{name} has {scale.numel()} scales; one for all heads is read")
        if not 0 < float(scale) < math.inf:
            raise ValueError(f"{name} is {float(scale)}; it must be a positive number")
        return float(scale)

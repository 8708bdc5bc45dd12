"""Compares our decoder with transformers' own code at load, on the same tensors.

transformers' model has no weights of its own: it takes views of the decoder's. It runs a few tokens
at near and far positions. Each of our blocks is then given the hidden states that transformers'
layer was given, so that every layer is compared by itself and errors do not add up.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.kernels.model.rms_norm import rms_norm

from .attention import PassContext, Rope
from .blocks import Block
from .decoder import Decoder
from .one_prompt import one_prompt
from .weights import Dense, Linear, Weight

# Rows of a decode, of a verification and of a prompt: each runs other kernels.
CHECKED_LENGTHS = (1, 5, 40)


class Original:
    """transformers' own code for a model, without weights."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager"
            )
        self.model.eval().requires_grad_(False)
        decoder = self.model.get_decoder()
        # RoPE's frequencies are no weights: on the meta device they have not been computed.
        decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
        self._device = device

    @property
    def rope(self) -> Rope:
        rotary = self.model.get_decoder().rotary_emb
        return Rope(rotary.inv_freq.float(), rotary.attention_scaling)

    def fill(self, decoder: Decoder) -> None:
        """Use the decoder's tensors as weights."""
        inner = self.model.get_decoder()
        _assign(self.model.get_input_embeddings(), decoder.embedding)
        _assign(inner.norm, decoder.norm.weight)
        for layer, block in zip(inner.layers, decoder.blocks, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            _assign(layer.input_layernorm, block.mixer.norm.weight)
            _assign(layer.post_attention_layernorm, block.mlp.norm.weight)
            if block.mixer.head_norms is not None:
                _assign(attention.q_norm, block.mixer.head_norms[0].weight)
                _assign(attention.k_norm, block.mixer.head_norms[1].weight)
            _split(block.mixer.qkv, attention.q_proj, attention.k_proj, attention.v_proj)
            _split(block.mixer.output, attention.o_proj)
            _split(block.mlp.gate_up, mlp.gate_proj, mlp.up_proj)
            _split(block.mlp.down, mlp.down_proj)
        _split(decoder.head, self.model.get_output_embeddings())
        left = [name for name, tensor in self.model.named_parameters() if tensor.is_meta]
        if left:
            raise ValueError(f"it has weights that the decoder lacks: {', '.join(left[:3])}")

    def run(self, input_ids: Tensor, positions: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the residual stream before each layer and after the last one, and the logits.

        Shape: [T] each -> [T, hidden] each, [T, V].
        """
        states: list[Tensor] = []
        decoder = self.model.get_decoder()
        hooks = [
            module.register_forward_pre_hook(
                lambda _, args, kwargs: states.append(_hidden(args, kwargs)), with_kwargs=True
            )
            for module in (*decoder.layers, decoder.norm)
        ]
        try:
            output = self.model(
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False
            )
        finally:
            for hook in hooks:
                hook.remove()
        return states, output.logits[0]


@torch.inference_mode()
def why_different(
    decoder: Decoder, original: Original, starts: Sequence[int], *, same_bits: bool = False
) -> str | None:
    """Names a part of the decoder that differs from transformers' model; None if all agree.

    Compares prompts that start at each of `starts`. `same_bits` selects the attention of a target
    whose rows must not depend on the batch.
    """
    generator = torch.Generator().manual_seed(0)
    for first, length in product(starts, CHECKED_LENGTHS):
        input_ids = torch.randint(0, len(decoder.embedding), (length,), generator=generator)
        input_ids = input_ids.to(decoder.device)
        context = one_prompt(input_ids, first, same_bits=same_bits)
        states, logits = original.run(input_ids, context.batch.rows.positions)
        if not torch.equal(decoder.embedding[input_ids], states[0]):
            return "its embedding"
        for i, block in enumerate(decoder.blocks):
            if not _agrees(block, states[i], states[i + 1], context):
                return f"layer {i} at position {first}"
        ours = decoder.head(rms_norm(states[-1].clone(), decoder.norm)).float()
        eps = torch.finfo(decoder.dtype).eps
        if (ours - logits.float()).norm() > 8 * eps * logits.float().norm():
            return "its last norm or head"
    return None


def _agrees(block: Block, x: Tensor, expected: Tensor, context: PassContext) -> bool:
    attention = block.mixer.attention
    attention.bind_pages(1, len(x), x.dtype, x.device)
    got = x.clone()
    block(got, None, None, context)
    attention.pages = None
    # Both round: the residual stream once, to its dtype, and the layer's output several times.
    eps = torch.finfo(x.dtype).eps
    before, expected, got = x.float(), expected.float(), got.float()
    tolerance = 4 * eps * expected.norm() + 8 * eps * (expected - before).norm()
    return bool((got - expected).norm() <= tolerance)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden_states: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden_states[0]


def _split(linear: Linear, *modules: nn.Linear) -> None:
    sizes = [module.out_features for module in modules]
    biases = linear.bias.split(sizes) if linear.bias is not None else [None] * len(modules)
    for i, (module, bias) in enumerate(zip(modules, biases, strict=True)):
        if bias is not None:
            module.bias = nn.Parameter(bias, requires_grad=False)
        if isinstance(linear.weight, Dense):
            _assign(module, linear.weight.matrix.split(sizes)[i])
        else:
            _assign_in_turn(module, linear.weight, sizes, i)


def _assign_in_turn(module: nn.Linear, weight: Weight, sizes: list[int], i: int) -> None:
    """Dequantise a module's weights only while it runs: for all at once there may be no room."""
    nothing = torch.empty(0)
    _assign(module, nothing)

    def take(*_: object) -> None:
        _assign(module, weight.dequantised().split(sizes)[i])

    def give_back(*_: object) -> None:
        _assign(module, nothing)

    module.register_forward_pre_hook(take)
    module.register_forward_hook(give_back)


def _assign(module: Any, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight, requires_grad=False)

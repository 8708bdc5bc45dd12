"""Decoder layers of the common shape, run as a few fused kernels instead of dozens of small ones.

On a CPU the kernels' references save as much: merged products over packed weights, no module, mask
or cache of transformers in between.

A layer is matched on its structure: pre-norm, separate q, k, v and o projections, optional norms
of query and key heads, full RoPE, and a gated MLP. What structure cannot tell (the activation, the
kind of norm, a multiplier somewhere) is settled by running the layer both ways at load: it keeps
its own code unless the outputs agree.
"""

import logging
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.attention import (
    KVPages,
    LayerSpec,
    PagedContext,
    attend,
    attention_context,
    bind_pages,
    current_context,
    pages_of,
)
from outrider.engine.batch import ForwardBatch
from outrider.kernels._dispatch import uses_triton
from outrider.kernels.linear import add_linear, linear
from outrider.kernels.packed_linear import PackedWeight, pack_weight
from outrider.kernels.rms_norm import Norm, rms_norm
from outrider.kernels.rope import rope_and_store, rotary_table

log = logging.getLogger(__name__)

Linear = tuple[Tensor | PackedWeight, Tensor | None]  # weight and bias

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # others look at how long sequences are


class FusedLayer:
    """Stands in for `forward` of a matched decoder layer."""

    def __init__(self, layer: Any, spec: LayerSpec, rounds: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._spec = spec
        self._qkv = _merged([attention.q_proj, attention.k_proj, attention.v_proj], rounds)
        self._o = _merged([attention.o_proj], rounds)
        self._gate_up = _merged([mlp.gate_proj, mlp.up_proj], rounds)
        self._down = _merged([mlp.down_proj], rounds)
        self.input_norm = _norm(layer.input_layernorm)
        self._post_norm = _norm(layer.post_attention_layernorm)
        has_head_norms = hasattr(attention, "q_norm")
        self._q_norm = _norm(attention.q_norm) if has_head_norms else None
        self._k_norm = _norm(attention.k_norm) if has_head_norms else None
        linears = (*(getattr(attention, name) for name in _ATTENTION), mlp.gate_proj, mlp.up_proj)
        self.num_weights: int = sum(each.weight.numel() for each in (*linears, mlp.down_proj))
        self._next_norm: Norm | None = None

    def precede(self, norm: Norm) -> None:
        """Apply what comes first behind this layer on the way, where that is a gain."""
        self._next_norm = norm

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **_: object,  # what else the model's loop hands to every layer; all of it is in the context
    ) -> Tensor:
        """Shape: hidden_states [1, T, hidden] -> the same; they are overwritten."""
        x, context = hidden_states[0], current_context()
        cos, sin = position_embeddings
        spec = self._spec
        normed = context.normed(hidden_states, self.input_norm)
        qkv = _linear(x, normed, self.input_norm, self._qkv)
        query = rope_and_store(
            qkv,
            cos[0],
            sin[0],
            *pages_of(spec.module),
            context.batch.slot_mapping,
            spec.num_heads,
            self._q_norm,
            self._k_norm,
        )
        out = attend(spec.module, query, spec.scale, spec.window, spec.softcap, spec.sinks)
        normed = add_linear(x, out.flatten(1), *self._o, norm=self._post_norm)
        gated = _linear(x, normed, self._post_norm, self._gate_up, gated=True)
        normed = add_linear(x, gated, *self._down, norm=self._next_norm)
        hidden_states = x[None]
        context.leave_normed(hidden_states, self._next_norm, normed)
        return hidden_states


def _linear(
    x: Tensor, normed: Tensor | None, norm: Norm, layer: Linear, *, gated: bool = False
) -> Tensor:
    """Of the normalised x, if that is there already."""
    if normed is None:
        return linear(x, *layer, norm=norm, gated=gated)
    return linear(normed, *layer, gated=gated)


class FusedRotary:
    """Stands in for `forward` of the module that makes the tables of RoPE."""

    def __init__(self, module: Any) -> None:
        self._inv_freq, self._scaling = module.inv_freq, module.attention_scaling

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: position_ids [1, T] -> [1, T, head_dim] each, in the dtype of x."""
        cos, sin = rotary_table(position_ids[0], self._inv_freq, self._scaling, x.dtype)
        return cos[None], sin[None]


class FusedNorm:
    """Stands in for `forward` of the norm behind the layers."""

    def __init__(self, module: Any) -> None:
        self._norm = _norm(module)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states.flatten(0, -2), self._norm).view_as(hidden_states)


@torch.inference_mode()
def fuse_layers(
    model: PreTrainedModel, specs: list[LayerSpec], *, rounds_on_cpu: bool = False
) -> int:
    """Fuse each decoder layer that has the structure and computes the same; returns how many.

    With `rounds_on_cpu` their weights are rounded to 8 bits where a CPU gains by it.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    # No list of all modules: it would keep the weights that the layers drop.
    layer_of: dict[int, Any] = {
        id(layer.self_attn): layer for layer in model.modules() if hasattr(layer, "self_attn")
    }
    fused_layers: list[FusedLayer] = []
    for spec in specs:
        layer = layer_of.get(id(spec.module))
        if layer is None or rotary is None or not _matches(layer, spec):
            continue
        fused = FusedLayer(layer, spec, rounds_on_cpu)
        if all(_agrees(layer, fused, spec, rotary, n) for n in (1, 5, 40)):
            _replace(layer, fused)
            fused_layers.append(fused)
    for fused, following in pairwise(fused_layers):
        fused.precede(following.input_norm)
    num_fused = len(fused_layers)
    if num_fused:
        _fuse_rotary(rotary)
        _fuse_norm(getattr(model.get_decoder(), "norm", None))
    log.info("%s: %d of %d layers are fused", model.config.model_type, num_fused, len(specs))
    return num_fused


def _merged(linears: list[nn.Linear], rounds_on_cpu: bool) -> Linear:
    """One weight and bias over all outputs, as the kernels want them."""
    weight: Tensor = linears[0].weight
    bias: Tensor | None = linears[0].bias
    if len(linears) > 1:
        weight = torch.cat([one.weight for one in linears])
        bias = torch.cat([one.bias for one in linears]) if bias is not None else None
    packed = None if uses_triton(weight) else pack_weight(weight, rounds=rounds_on_cpu)
    return weight if packed is None else packed, bias


def _replace(layer: Any, fused: FusedLayer) -> None:
    """Let `fused` compute the layer, and free the weights that only the layer's own code reads."""
    layer.forward = fused
    for parent in (layer.self_attn, layer.mlp):
        for name, _ in list(parent.named_children()):
            if name.endswith("_proj"):
                delattr(parent, name)


def _matches(layer: nn.Module, spec: LayerSpec) -> bool:
    children: dict[str, Any] = dict(layer.named_children())
    if set(children) != _LAYER:
        return False
    attention: dict[str, Any] = dict(spec.module.named_children())
    mlp: dict[str, Any] = dict(children["mlp"].named_children())
    if set(attention) not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or set(mlp) != _MLP:
        return False
    norms = [children["input_layernorm"], children["post_attention_layernorm"]]
    norms += [module for name, module in attention.items() if name in _HEAD_NORMS]
    linears = [module for name, module in (attention | mlp).items() if name.endswith("_proj")]
    return (
        spec.head_dim == spec.value_dim
        and all(type(module) is nn.Linear for module in linears)
        and len({module.weight.dtype for module in linears}) == 1
        and len({attention[name].bias is None for name in ("q_proj", "k_proj", "v_proj")}) == 1
        and (mlp["gate_proj"].bias is None) == (mlp["up_proj"].bias is None)
        and all(_epsilon(norm) is not None and norm.weight.ndim == 1 for norm in norms)
        and all(
            len(module.weight) == spec.head_dim
            for name, module in attention.items()
            if name in _HEAD_NORMS
        )
    )


def _epsilon(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _norm(module: Any) -> Norm:
    epsilon = _epsilon(module)
    assert epsilon is not None
    return Norm(module.weight, epsilon)


def _agrees(layer: Any, fused: FusedLayer, spec: LayerSpec, rotary: Any, num_rows: int) -> bool:
    """Whether a layer and its fused form do the same to one prompt of random hidden states."""
    weight = fused.input_norm.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    hidden_states = torch.randn(
        1, num_rows, len(weight), generator=generator, dtype=weight.dtype, device=weight.device
    )
    positions = torch.arange(num_rows, device=weight.device)
    position_embeddings = rotary(hidden_states, positions[None])
    if position_embeddings[0].shape[-1] != spec.head_dim:
        return False
    cache = hidden_states.new_empty(1, num_rows, spec.num_kv_heads, spec.head_dim)
    bind_pages(spec.module, KVPages(cache, cache.clone()))
    arguments = {
        "attention_mask": None,
        "position_ids": positions[None],
        "position_embeddings": position_embeddings,
        "use_cache": False,
    }
    with attention_context(PagedContext(one_prompt(positions))):
        expected = layer(hidden_states.clone(), **arguments).float()
        got = fused(hidden_states.clone(), **arguments).float()
    # Both round: the residual stream to its dtype, what the layer adds to it several times over.
    eps = torch.finfo(weight.dtype).eps
    tolerance = 4 * eps * expected.norm() + 8 * eps * (expected - hidden_states).norm()
    return bool((got - expected).norm() <= tolerance)


def _fuse_rotary(module: Any) -> None:
    """Fuse the tables of RoPE, if they depend on nothing but positions and are the same."""
    if getattr(module, "rope_type", None) not in _STATIC_ROPE:
        return
    inv_freq = module.inv_freq
    x = torch.empty(1, dtype=torch.float32, device=inv_freq.device)
    positions = torch.tensor([[0, 1, 77, 1000, 30_000]], device=inv_freq.device)
    fused = FusedRotary(module)
    if all(
        got.shape == expected.shape and bool((got - expected).abs().max() < 1e-5)
        for got, expected in zip(fused(x, positions), module(x, positions), strict=True)
    ):
        module.forward = fused


def _fuse_norm(module: Any) -> None:
    """Fuse the norm behind the layers, if that computes the same."""
    if _epsilon(module) is None:
        return
    weight, fused = module.weight, FusedNorm(module)
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(1, 5, len(weight), generator=generator, device=weight.device).to(weight.dtype)
    expected, got = module(x).float(), fused(x).float()
    if (got - expected).norm() <= 4 * torch.finfo(weight.dtype).eps * expected.norm():
        module.forward = fused


def one_prompt(positions: Tensor) -> ForwardBatch:
    """A whole prompt in one page."""
    length = len(positions)
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=positions,
        slots=torch.zeros_like(positions[:1]),
        seq_lens=torch.full_like(positions[:1], length),
        cu_seqlens_q=torch.tensor([0, length], device=positions.device),
        logits_rows=positions,
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=positions.device),
        page_size=length,
    )

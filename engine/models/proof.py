"""Compares our decoder with transformers' own code at load, on the same tensors.

transformers' model has no weights of its own: it takes views of the decoder's. It runs a few tokens
at near and far positions. Each of our blocks is then given the hidden states that transformers'
layer was given, so that every layer is compared by itself and errors do not add up.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.kernels.compiling import compile_together
from outrider.kernels.model.expert_matrix import Experts, expert_of
from outrider.kernels.model.rms_norm import rms_norm
from outrider.kernels.model.routing import route, routing_of

from .attention import ForwardBatch
from .blocks import Block
from .decoder import Decoder
from .experts import ExpertMLP
from .one_prompt import PAGE, num_pages_of, one_prompt
from .weights import Linear

# Rows of a prompt, of a decode and of a verification: each runs other kernels.
CHECKED_LENGTHS = (40, 1, 5)


class Original:
    """transformers' own code for a model, without weights."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # which it changes
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
            )
        self.model.eval().requires_grad_(False)
        decoder = self.model.get_decoder()
        # RoPE's frequencies are no weights: on the meta device they have not been computed.
        decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)

    def fill(self, decoder: Decoder) -> None:
        """Use the decoder's tensors as weights. Raises ValueError if only one has some of them."""
        inner = self.model.get_decoder()
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        _assign(self.model.get_input_embeddings(), decoder.embedding)
        _assign(inner.norm, decoder.norm.weight)
        for layer, block in zip(inner.layers, decoder.blocks, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            _assign(layer.input_layernorm, block.mixer.norm.weight)
            _assign(layer.post_attention_layernorm, block.mlp.norm.weight)
            if block.mixer.head_norms is not None:
                if not hasattr(attention, "q_norm"):
                    raise ValueError("transformers leaves out q_norm and k_norm")
                _assign(attention.q_norm, block.mixer.head_norms[0].weight)
                _assign(attention.k_norm, block.mixer.head_norms[1].weight)
            _split(block.mixer.qkv, attention.q_proj, attention.k_proj, attention.v_proj)
            _split(block.mixer.output, attention.o_proj)
            sinks = block.mixer.attention.sinks
            if sinks is not None:
                attention.sinks = nn.Parameter(sinks, requires_grad=False)
            if isinstance(block.mlp, ExpertMLP):
                mlp.router.out_features = len(mlp.router.weight)  # which a linear layer has
                _split(block.mlp.router, mlp.router)
                _assign_experts(mlp.experts, block.mlp.experts.matrices, decoder.dtype)
            else:
                _split(block.mlp.gate_up, mlp.gate_proj, mlp.up_proj)
                _split(block.mlp.down, mlp.down_proj)
        _split(decoder.head, self.model.get_output_embeddings())
        parameters = list(self.model.named_parameters())
        left = [name for name, tensor in parameters if tensor.is_meta]
        if left:
            raise ValueError(f"it has weights that the decoder lacks: {', '.join(left[:3])}")
        # Zeros change nothing: some quantisers give every layer such a bias.
        added = [name for name, tensor in parameters if name not in names and tensor.any()]
        if added:
            raise ValueError(f"transformers leaves out {', '.join(added[:3])}")

    def run(self, batches: Sequence[ForwardBatch]) -> "list[OriginalPass]":
        """One pass over these prompts, for which each weight is dequantised once."""
        # Padded at their ends, which no token before sees; padding has position 0.
        input_ids = pad_sequence([batch.input_ids for batch in batches], batch_first=True)
        positions = pad_sequence([batch.rows.positions for batch in batches], batch_first=True)
        states: list[Tensor] = []  # [prompts, longest, hidden] each
        decoder = self.model.get_decoder()
        routers: list[Routed | None] = [None] * len(decoder.layers)
        hooks = [
            module.register_forward_pre_hook(
                lambda _, args, kwargs: states.append(_hidden(args, kwargs)), with_kwargs=True
            )
            for module in (*decoder.layers, decoder.norm)
        ]
        for i, layer in enumerate(decoder.layers):
            if hasattr(layer.mlp, "router"):
                hooks.append(layer.mlp.router.register_forward_hook(partial(_note, routers, i)))
        try:
            output = self.model(input_ids=input_ids, position_ids=positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

        def part(tensor: Tensor, i: int) -> Tensor:
            return tensor.reshape(*input_ids.shape, -1)[i, : len(batches[i].input_ids)]

        return [
            OriginalPass(
                [part(state, i) for state in states],
                [told and Routed(*(part(tensor, i) for tensor in told)) for told in routers],
                part(output.logits, i),
            )
            for i in range(len(batches))
        ]


class Routed(NamedTuple):
    """The inputs and outputs of transformers' router."""

    normed: Tensor  # [T, hidden]
    logits: Tensor  # [T, E]
    weights: Tensor  # [T, k]
    ids: Tensor  # [T, k]


class OriginalPass(NamedTuple):
    """A prompt's part of a pass of transformers' model."""

    states: list[Tensor]  # [T, hidden] each: before each layer and after the last one
    routers: list[Routed | None]  # of each layer, if it has experts
    logits: Tensor  # [T, V]


def _note(routers: list[Routed | None], i: int, _: nn.Module, args: Any, output: Any) -> None:
    routers[i] = Routed(args[0], *output)


@torch.inference_mode()
def why_different(
    decoder: Decoder, original: Original, starts: Sequence[int], *, batch_invariant: bool = False
) -> str | None:
    """Names a part of the decoder that differs from transformers' model; None if all agree.

    Compares prompts of all lengths at the first of `starts`, and of the last length at the others:
    which kernels run depends on the length alone. `batch_invariant` selects the attention of a
    target whose rows must not depend on the batch.
    """
    generator = torch.Generator().manual_seed(0)
    passes = [(starts[0], length) for length in CHECKED_LENGTHS]
    passes += [(first, CHECKED_LENGTHS[-1]) for first in starts[1:]]
    batches = []
    for first, length in passes:
        input_ids = torch.randint(0, len(decoder.embedding), (length,), generator=generator)
        batches.append(
            one_prompt(input_ids.to(decoder.device), first, batch_invariant=batch_invariant)
        )
    # The longest by itself: to pad the others to its length would take memory.
    originals = original.run(batches[:1]) + original.run(batches[1:])

    def differences() -> Iterator[str]:
        for batch, theirs in zip(batches, originals, strict=True):
            # A copy each time: compiling computes none of what a batch keeps.
            yield from _differences(decoder, replace(batch), theirs)

    compile_together([lambda: list(differences())], decoder.device)
    return next(differences(), None)


def _differences(decoder: Decoder, batch: ForwardBatch, theirs: OriginalPass) -> Iterator[str]:
    """Names the parts that compute something else for one prompt."""
    states, routers, logits = theirs
    if not torch.equal(decoder.embedding[batch.input_ids], states[0]):
        yield "its embedding"
    for i, block in enumerate(decoder.blocks):
        routed = routers[i]
        if not _agrees(block, states[i], states[i + 1], batch, routed):
            yield f"layer {i} at position {int(batch.rows.positions[0])}"
        if routed is not None and not _routes_alike(block, routed):
            yield f"the router of layer {i}"
    ours = decoder.head(rms_norm(states[-1].clone(), decoder.norm)).float()
    eps = max(torch.finfo(decoder.dtype).eps, decoder.head.weight.input_eps)
    if (ours - logits.float()).norm() > 8 * eps * logits.float().norm():
        yield "its last norm or head"


def _agrees(
    block: Block, x: Tensor, expected: Tensor, batch: ForwardBatch, routed: Routed | None
) -> bool:
    block.mixer.attention.bind_pages(num_pages_of(len(x)), PAGE, x.dtype, x.device)
    got = x.clone()
    if routed is None:
        block(got, None, None, batch)
    else:  # with the same experts: rounding may turn a choice between two that are nearly equal
        assert isinstance(block.mlp, ExpertMLP)
        normed = block.mixer(got, None, block.mlp.norm, batch)
        if normed is None:
            normed = rms_norm(got, block.mlp.norm)
        assert isinstance(normed, Tensor)
        weights = routed.weights.float().contiguous()
        num_experts = routed.logits.shape[1]
        block.mlp.add(got, normed, routing_of(routed.ids.int(), weights, num_experts))
    block.mixer.attention.pages = None
    # Both round: the residual stream once, to its dtype, and the layer's output several times.
    # Where inputs are rounded further, the least difference may turn one to the next code.
    eps = max(torch.finfo(x.dtype).eps, *(linear.weight.input_eps for linear in block.linears))
    before, expected, got = x.float(), expected.float(), got.float()
    tolerance = 4 * eps * expected.norm() + 8 * eps * (expected - before).norm()
    return bool((got - expected).norm() <= tolerance)


def _routes_alike(block: Block, routed: Routed) -> bool:
    """Whether our router computes these logits, and chooses the same experts from them."""
    assert isinstance(block.mlp, ExpertMLP)
    eps, theirs = torch.finfo(routed.logits.dtype).eps, routed.logits.float()
    ours = block.mlp.router(routed.normed).float()
    routing = route(routed.logits, routed.ids.shape[1])  # before a verdict: compiling launches both
    if not (ours - theirs).norm() <= 8 * eps * theirs.norm():
        return False
    # Of equal logits either may be chosen.
    chosen = [theirs.gather(1, ids.long()) for ids in (routing.ids, routed.ids)]
    return torch.equal(*chosen) and torch.allclose(
        routing.weights, routed.weights.float(), rtol=0, atol=4 * eps
    )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden_states: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden_states


def _split(linear: Linear, *modules: nn.Linear) -> None:
    """Give each module its part of a layer's weight and bias, and its inputs as the weight takes
    them.

    A weight is dequantised only while its modules run, since all at once may not fit. The first
    module that runs does it for all of them.
    """
    sizes = [module.out_features for module in modules]
    biases = linear.bias.split(sizes) if linear.bias is not None else [None] * len(modules)
    for module, bias in zip(modules, biases, strict=True):
        if bias is not None:
            module.bias = nn.Parameter(bias, requires_grad=False)
    nothing = torch.empty(0)
    parts: dict[nn.Linear, Tensor] = {}  # of modules that have yet to run

    def take(first: int, module: nn.Linear, args: tuple[Tensor]) -> tuple[Tensor]:
        if module not in parts:
            parts.update(zip(modules, linear.weight.dequantised().split(sizes), strict=True))
        _assign(module, parts.pop(module))
        taken = linear.weight.taken(args[0].flatten(0, -2), first)
        return (taken.view_as(args[0]),)

    def give_back(module: nn.Linear, *_: object) -> None:
        _assign(module, nothing)

    for i, module in enumerate(modules):
        _assign(module, nothing)
        module.register_forward_pre_hook(partial(take, sum(sizes[:i])))
        module.register_forward_hook(give_back)


def _assign_experts(module: Any, experts: Experts, dtype: torch.dtype) -> None:
    """Give a module the experts' matrices, transposed and interleaved, only while it runs."""
    layers = {"gate_up_proj": experts.gate_up, "down_proj": experts.down}
    nothing = torch.empty(0)

    def take(*_: object) -> None:
        for name, layer in layers.items():
            num_in = layer.matrix.num_in
            whole = layer.bias.new_empty(layer.num_experts, num_in, layer.num_out, dtype=dtype)
            biases = layer.bias.new_empty(layer.num_experts, layer.num_out)
            for i in range(layer.num_experts):
                matrix, bias = expert_of(layer, i, dtype)
                if layer is experts.gate_up:
                    matrix = matrix.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
                    bias = bias.view(2, -1).t().flatten()
                whole[i], biases[i] = matrix.t(), bias
            setattr(module, name, nn.Parameter(whole, requires_grad=False))
            setattr(module, f"{name}_bias", nn.Parameter(biases, requires_grad=False))

    def give_back(*_: object) -> None:
        for name in layers:
            setattr(module, name, nn.Parameter(nothing, requires_grad=False))
            setattr(module, f"{name}_bias", nn.Parameter(nothing, requires_grad=False))

    give_back()
    module.register_forward_pre_hook(take)
    module.register_forward_hook(give_back)


def _assign(module: Any, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight, requires_grad=False)

"""Loads a head for the target that it was made for."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.kernels.model.rms_norm import Norm

from ..config import ModelConfig
from .admission import DTYPES
from .attention import PagedAttention, Rope
from .block_head import BlockHead, ConfidenceHead, MarkovHead
from .blocks import AttentionMixer, Block, GatedMLP
from .checkpoint import Checkpoint
from .eagle3 import Eagle3Head
from .head import Head
from .head_config import BlockConfig, HeadConfig, HeadError
from .loading import rounds_weights
from .network import Network
from .weights import Dense, Linear


def load_head(
    config: ModelConfig,
    target: Network,
    target_path: str,
    progress: Callable[[int, int], None] | None = None,
) -> Head:
    """Load the head in a directory; from now on the target hands out the states that it reads.

    The head computes in the target's dtype. Raises HeadError naming both models.
    """
    folder = Path(config.path)
    with _told(f"the head {config.path} cannot draft for {target_path}"):
        if config.quantization not in (None, "fp8"):
            raise HeadError(f"draft.quantization is {config.quantization!r}; it may be fp8")
        if config.dtype != "auto" and DTYPES.get(config.dtype) != target.dtype:
            raise HeadError(
                f"its dtype is set to {config.dtype}, but a head computes in its target's, which "
                f"is {str(target.dtype).removeprefix('torch.')}: leave draft.dtype out"
            )
        head_config = HeadConfig.load(folder)
        if config.head_layers:
            head_config = replace(head_config, boundaries=tuple(sorted(config.head_layers)))
        boundaries = head_config.boundaries_of(len(target.attentions))
        checkpoint = Checkpoint(
            folder,
            target.dtype,
            target.device,
            progress or (lambda done, total: None),
            rounds=config.quantization is not None,
        )
        head = _build(head_config, checkpoint, target, len(boundaries))
        try:
            target.tap([boundary - 1 for boundary in boundaries])
        except ValueError as error:
            raise HeadError(str(error)) from None
    if target.device.type == "cpu":
        head.pack(rounds=rounds_weights(config, is_draft=True))
    return head


def _build(config: HeadConfig, checkpoint: Checkpoint, target: Network, num_taps: int) -> Head:
    layers, width = config.layers, config.layers.hidden_size
    vocab_size, target_width = target.input_embedding.shape
    if config.target_hidden_size != target_width and "fc.weight" not in checkpoint:
        raise HeadError(
            f"it reads states of width {config.target_hidden_size}, the target's are {target_width}"
        )

    def norm(name: str, size: int = width) -> Norm:
        weight = checkpoint.tensor(f"{name}.weight")
        _check_shape(f"{name}.weight", weight, (size,))
        return Norm(weight, layers.rms_norm_eps)

    fc = checkpoint.linear("fc")
    if fc.weight.shape != (width, num_taps * target_width):
        raise HeadError(
            f"fc.weight is {fc.weight.shape[0]} x {fc.weight.shape[1]}; for {num_taps} hidden "
            f"states of this target, each {target_width} wide, it must be {width} x "
            f"{num_taps * target_width}"
        )
    first = "midlayer" if "midlayer.hidden_norm.weight" in checkpoint else "layers.0"
    shared: dict[str, Any] = {
        "fc": fc,
        "embedding": _embedding(checkpoint, target, width),
        "blocks": _blocks(config, checkpoint, first, norm, target.device),
        "norm": norm("norm"),
        "head": _output_head(config, checkpoint, target),
        "target_ids": _target_ids(config, checkpoint, vocab_size, target.vocab_size, target.device),
        "vocab_size": target.vocab_size,
    }
    if config.block is not None:
        return _block_head(config, config.block, checkpoint, norm, shared)
    if config.kind == "peagle" or "mask_hidden" in checkpoint:
        shared |= _mask(config, checkpoint, shared["embedding"], num_taps, target_width)
    return Eagle3Head(
        fc_norms=_fc_norms(config, checkpoint, norm, num_taps, target_width),
        hidden_norm=norm(f"{first}.hidden_norm"),
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        **shared,
    )


def _mask(
    config: HeadConfig, checkpoint: Checkpoint, embedding: Tensor, num_taps: int, width: int
) -> dict[str, Any]:
    """The states and the token that a mask row has in place of real ones."""
    hidden = checkpoint.tensor("mask_hidden")
    if hidden.numel() != num_taps * width:
        raise HeadError(
            f"mask_hidden has {hidden.numel()} numbers; for {num_taps} hidden states, each {width} "
            f"wide, it must have {num_taps * width}"
        )
    _check_mask_token(config.mask_token_id, embedding)
    return {"mask_hidden": hidden.view(num_taps, width), "mask_token_id": config.mask_token_id}


def _check_mask_token(token_id: int | None, embedding: Tensor) -> None:
    if token_id is None:
        raise HeadError("its config names no mask token (mask_token_id)")
    if not 0 <= token_id < len(embedding):
        raise HeadError(f"its mask token is {token_id}, but there are {len(embedding)} embeddings")


def _block_head(
    config: HeadConfig,
    block: BlockConfig,
    checkpoint: Checkpoint,
    norm: Callable[..., Norm],
    shared: dict[str, Any],
) -> BlockHead:
    width = config.layers.hidden_size
    _check_mask_token(block.mask_token_id, shared["embedding"])
    markov = None
    if block.markov is not None:
        name = "markov_head"
        previous = checkpoint.tensor(f"{name}.markov_w1.weight")
        rank = previous.shape[1]
        _check_shape(f"{name}.markov_w1.weight", previous, (config.layers.vocab_size, rank))
        markov = MarkovHead(
            embedding=previous,
            output=_linear(checkpoint, f"{name}.markov_w2", config.draft_vocab_size, rank),
            gate=_linear(checkpoint, f"{name}.gate_proj", rank, width + rank)
            if block.markov == "gated"
            else None,
            joint=_linear(checkpoint, f"{name}.joint_proj", 3 * rank, 2 * rank + width)
            if block.markov == "rnn"
            else None,
        )
    confidence = None
    if block.has_confidence and "confidence_head.proj.weight" in checkpoint:
        weight = checkpoint.tensor("confidence_head.proj.weight").float()
        widths = {width} if markov is None else {width, width + markov.embedding.shape[1]}
        if weight.shape not in {(1, size) for size in widths}:
            _check_shape("confidence_head.proj.weight", weight, (1, max(widths)))
        has_bias = "confidence_head.proj.bias" in checkpoint
        bias = checkpoint.tensor("confidence_head.proj.bias") if has_bias else weight.new_zeros(1)
        confidence = ConfidenceHead(weight[0], bias.float())
    return BlockHead(
        hidden_norm=norm("hidden_norm"),
        context_kv=[
            _kv_part(checkpoint, f"layers.{i}.self_attn", each)
            for i, each in enumerate(shared["blocks"])
        ],
        block_size=block.size,
        mask_token_id=block.mask_token_id,
        predicts_from_anchor=block.predicts_from_anchor,
        embedding_scale=block.embedding_scale,
        markov=markov,
        confidence=confidence,
        **shared,
    )


def _kv_part(checkpoint: Checkpoint, attention_name: str, block: Block) -> Linear:
    """The part of the mixer's qkv that computes keys and values; a view if the matrix is plain."""
    weight, bias = block.mixer.qkv
    if not isinstance(weight, Dense):  # each output is rounded by itself, so these are the same
        return checkpoint.linear(f"{attention_name}.k_proj", f"{attention_name}.v_proj")
    attention = block.mixer.attention
    first = attention.num_heads * attention.head_dim
    return Linear(Dense(weight.matrix[first:]), None if bias is None else bias[first:])


def _linear(checkpoint: Checkpoint, name: str, num_outputs: int, num_inputs: int) -> Linear:
    made = checkpoint.linear(name)
    _check_shape(f"{name}.weight", made.weight, (num_outputs, num_inputs))
    return made


def _output_head(config: HeadConfig, checkpoint: Checkpoint, target: Network) -> Linear:
    """The head's own output layer, or the target's if it has none."""
    width = config.layers.hidden_size
    if "lm_head.weight" in checkpoint or config.block is None:
        return _linear(checkpoint, "lm_head", config.draft_vocab_size, width)
    if (config.draft_vocab_size, width) != target.output_head.weight.shape:
        size, target_width = target.output_head.weight.shape
        raise HeadError(
            f"it has no lm_head of its own, and the target's is {size} x {target_width} where the "
            f"head's must be {config.draft_vocab_size} x {width}"
        )
    return target.output_head


def _blocks(
    config: HeadConfig,
    checkpoint: Checkpoint,
    first: str,
    norm: Callable[..., Norm],
    device: torch.device,
) -> list[Block]:
    layers, block = config.layers, config.block
    rotary = LlamaRotaryEmbedding(layers)
    rope = Rope(rotary.inv_freq.float().to(device), rotary.attention_scaling)
    names = [first, *(f"layers.{i}" for i in range(1, layers.num_hidden_layers))]
    reads_both = block is None  # EAGLE-3's first layer reads [e; a]
    return [
        _block(
            config,
            checkpoint,
            rope,
            name,
            norm,
            input_width=layers.hidden_size * (2 if reads_both and i == 0 else 1),
            window=_window(config) if block is None else block.windows[i],
            causal=block is None or block.causal[i],
        )
        for i, name in enumerate(names)
    ]


def _block(
    config: HeadConfig,
    checkpoint: Checkpoint,
    rope: Rope,
    name: str,
    norm: Callable[..., Norm],
    *,
    input_width: int,
    window: int | None,
    causal: bool,
) -> Block:
    layers: Any = config.layers
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    head_dim, width = layers.head_dim, layers.hidden_size
    num_heads, num_kv_heads = layers.num_attention_heads, layers.num_key_value_heads
    has_head_norms = f"{attention}.q_norm.weight" in checkpoint
    # In later layers, some trainers give the only norm the other name.
    input_norm = f"{name}.input_layernorm"
    if f"{input_norm}.weight" not in checkpoint:
        input_norm = f"{name}.hidden_norm"

    def linear(num_inputs: int, **num_outputs: int) -> Linear:
        made = checkpoint.linear(*num_outputs)
        _check_shape(" + ".join(num_outputs), made.weight, (sum(num_outputs.values()), num_inputs))
        return made

    mixer = AttentionMixer(
        norm=norm(input_norm),
        qkv=linear(
            input_width,
            **{
                f"{attention}.q_proj": num_heads * head_dim,
                f"{attention}.k_proj": num_kv_heads * head_dim,
                f"{attention}.v_proj": num_kv_heads * head_dim,
            },
        ),
        output=linear(num_heads * head_dim, **{f"{attention}.o_proj": width}),
        attention=PagedAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
            window=window,
            causal=causal,
        ),
        rope=rope,
        head_norms=(
            norm(f"{attention}.q_norm", head_dim),
            norm(f"{attention}.k_norm", head_dim),
        )
        if has_head_norms
        else None,
    )
    inner = layers.intermediate_size
    gated_mlp = GatedMLP(
        norm=norm(f"{name}.post_attention_layernorm"),
        gate_up=linear(width, **{f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}),
        down=linear(inner, **{f"{mlp}.down_proj": width}),
    )
    return Block(mixer, gated_mlp)


def _window(config: HeadConfig) -> int | None:
    layers = config.layers
    types = getattr(layers, "layer_types", None)
    is_sliding = (
        "sliding_attention" in types if types else getattr(layers, "use_sliding_window", False)
    )
    window: int | None = getattr(layers, "sliding_window", None) if is_sliding else None
    return window


def _fc_norms(
    config: HeadConfig,
    checkpoint: Checkpoint,
    norm: Callable[..., Norm],
    num_taps: int,
    target_width: int,
) -> list[Norm]:
    if config.fc_norm or "fc_norm.0.weight" in checkpoint:
        return [norm(f"fc_norm.{i}", target_width) for i in range(num_taps)]
    if config.norm_before_fc or "input_norm.weight" in checkpoint:
        return [norm("input_norm", num_taps * target_width)]
    return []


def _embedding(checkpoint: Checkpoint, target: Network, width: int) -> Tensor:
    """The head's own embedding, or the target's if it has none or a copy."""
    theirs, name = target.input_embedding, "embed_tokens.weight"
    if name not in checkpoint:
        if theirs.shape[1] != width:
            raise HeadError(
                f"it has no embedding of its own, and the target's is {theirs.shape[1]} wide where "
                f"the head is {width}"
            )
        return theirs
    own = checkpoint.tensor(name)
    _check_shape(name, own, (len(theirs), width))
    return theirs if own.shape == theirs.shape and torch.equal(own, theirs) else own


def _target_ids(
    config: HeadConfig,
    checkpoint: Checkpoint,
    vocab_size: int,
    num_logits: int,
    device: torch.device,
) -> Tensor | None:
    """The target's id for each id of the draft; None if they are equal."""
    if config.layers.vocab_size != vocab_size:
        raise HeadError(
            f"it was made for a vocabulary of {config.layers.vocab_size} tokens, the target has "
            f"{vocab_size}"
        )
    size = config.draft_vocab_size
    if "d2t" not in checkpoint:
        if size != vocab_size:
            raise HeadError(
                f"it drafts {size} of {vocab_size} tokens, but its file has no map of them (d2t)"
            )
        return None
    offsets = checkpoint.integers("d2t")
    if offsets.shape != (size,):
        raise HeadError(f"d2t has {len(offsets)} entries for a draft vocabulary of {size}")
    ids = torch.arange(size) + offsets
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= min(vocab_size, num_logits)):
        raise HeadError(
            f"d2t leads to token ids from {int(ids.min())} to {int(ids.max())}; the target's are 0 "
            f"to {min(vocab_size, num_logits) - 1}"
        )
    if not bool((ids.diff() > 0).all()):
        raise HeadError("d2t leads two of its tokens to the same id of the target, or out of order")
    if "t2d" in checkpoint:
        told = checkpoint.integers("t2d")
        if told.shape != (vocab_size,) or not torch.equal(told.nonzero().squeeze(1), ids):
            raise HeadError("t2d and d2t disagree about which tokens it drafts")
    return ids.to(device)


def _check_shape(name: str, found: "Tensor | object", shape: tuple[int, ...]) -> None:
    got = tuple(getattr(found, "shape"))  # noqa: B009 - of a tensor or a Weight
    if got != shape:
        raise HeadError(
            f"{name} is {' x '.join(map(str, got))}; by its config it must be "
            f"{' x '.join(map(str, shape))}"
        )


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Add the names of both models to errors."""
    try:
        yield
    except KeyError as error:
        raise HeadError(f"{what}: its file has no tensor {error}") from None
    except (SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise HeadError(f"{what}: its file is damaged or cut short ({error})") from None
    except (FileNotFoundError, HeadError, ValueError) as error:
        raise HeadError(f"{what}: {error}") from None
    except (OSError, RuntimeError) as error:
        raise HeadError(f"{what}: its file is damaged or cut short ({error})") from None

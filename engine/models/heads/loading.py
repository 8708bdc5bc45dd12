"""Loads the head of a target: one from a directory of its own, or an MTP head beside the target."""

import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.kernels._dispatch import converts_fp8
from outrider.kernels.model.rms_norm import Norm

from ...api import ignore_progress
from ...config import ModelConfig
from ...progress import ReportCounts
from ..admission import DTYPES
from ..architectures import load_config
from ..blocks import Block
from ..checkpoint import AnyCheckpoint, Checkpoint, check_shape
from ..families import FAMILIES
from ..families.base import window_of
from ..families.llama import Llama
from ..formats.fp8 import rounding
from ..gguf_checkpoint import open_checkpoint
from ..loading import quantised_format, rounds_weights
from ..narrow_weight import in_fp8
from ..network import Network
from ..parts.attention import Attention
from ..parts.convolved import Convolved
from ..unread import layer_of
from ..weights import Dense, Layer, Linear
from .block_head import BlockHead, Context
from .chain import ConfidenceHead, MarkovHead, Selector
from .config import MTP_COUNTS, MTP_HEAD, BlockConfig, HeadConfig, HeadError, head_kind, mtp_names
from .eagle3 import Eagle3Head
from .head import Head
from .mtp import MtpHead
from .vocabulary import (
    check_mask_token,
    read_embedding,
    read_mtp_embedding,
    read_output_layer,
    read_target_ids,
)

log = logging.getLogger(__name__)


def load_head(
    config: ModelConfig, target: Network, target_path: str, report: ReportCounts = ignore_progress
) -> Head:
    """Load the head in a directory; from now on the target hands out the states that it reads.

    The head computes in the target's dtype. Raises HeadError naming both models.
    """
    is_mtp = config.is_mtp or head_kind(config.path) == MTP_HEAD
    name, read = ("MTP head of", _read_mtp_head) if is_mtp else ("head", _read_head)
    with _naming_both_models(f"the {name} {config.path} cannot draft for {target_path}"):
        _check_settings(config, target)
        head, tapped = read(config, target, report)
        _narrow(head, config.attention_window)
        target.tap(tapped)
    head.cache_dtype = target.cache_dtype
    if target.device.type != "cpu" and _rounds(config, target):
        head.output_layer = in_fp8(head.output_layer)  # which may be the target's
    if target.device.type == "cpu":
        head.change_linears(partial(Layer.packed, rounds=rounds_weights(config, is_draft=True)))
    return head


def _check_settings(config: ModelConfig, target: Network) -> None:
    """Refuse settings that a head cannot have; raises HeadError."""
    if config.quantization not in (None, "fp8"):
        raise HeadError(f"draft.quantization is {config.quantization!r}; it may be fp8")
    if config.dtype != "auto" and DTYPES.get(config.dtype) != target.dtype:
        raise HeadError(
            f"its dtype is set to {config.dtype}, but a head computes in its target's, which "
            f"is {str(target.dtype).removeprefix('torch.')}: leave draft.dtype out"
        )


def _rounds(config: ModelConfig, target: Network) -> bool:
    """Whether a head is rounded to FP8: if that is asked for, or free and fast."""
    if config.quantization is not None:
        return True
    is_free = rounds_weights(config, is_draft=True) and target.dtype.itemsize == 2
    return is_free and converts_fp8(target.device)


def _narrow(head: Head, window: int | None) -> None:
    """Let its layers attend to the last tokens alone; raises HeadError if they see all of a block.

    A head that was trained on short texts drafts better so, far beyond their length.
    """
    if window is None:
        return
    if isinstance(head, BlockHead):
        raise HeadError(
            f"draft.attention_window is {window}, but the layers of a {head.kind} head have "
            "windows of their own, or none: leave it out"
        )
    for layer in head.attentions:
        layer.window = window if layer.window is None else min(window, layer.window)


@contextmanager
def _naming_both_models(what: str) -> Iterator[None]:
    """Add the names of both models to errors."""
    try:
        yield
    except KeyError as error:
        raise HeadError(f"{what}: its file has no tensor {error}") from None
    except (FileNotFoundError, ValueError) as error:
        raise HeadError(f"{what}: {error}") from None
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, pickle.UnpicklingError, EOFError, OSError, RuntimeError) as error:
        raise HeadError(f"{what}: its file is damaged or cut short ({error})") from None
    except (ArithmeticError, AttributeError, TypeError) as error:  # words in place of numbers
        kind = type(error).__name__
        raise HeadError(f"{what}: its config.json is damaged ({kind}: {error})") from error


def _read_head(
    config: ModelConfig, target: Network, report: ReportCounts
) -> tuple[Head, list[int]]:
    """The head in a directory, and the layers of the target whose states it reads.

    Raises KeyError naming a tensor that is missing, HeadError naming what does not fit.
    """
    head_config = HeadConfig.load(Path(config.path))
    if config.head_layers:
        head_config = replace(head_config, boundaries=tuple(sorted(config.head_layers)))
    boundaries = head_config.boundaries_of(target.num_layers)
    read = rounding(rounds_inputs=True) if _rounds(config, target) else None
    checkpoint = Checkpoint(Path(config.path), target.dtype, target.device, report, read=read)
    head = _build(head_config, checkpoint, target, len(boundaries))
    most = head_config.layers.num_hidden_layers
    beyond = sorted(name for name in checkpoint.unread() if layer_of(name) >= most)
    if left_out := [*beyond, *checkpoint.biases_left_out()]:
        raise HeadError(
            f"its file has {left_out[0]}, and the head of its config has no such tensor"
        )
    return head, [boundary - 1 for boundary in boundaries]


def _build(config: HeadConfig, checkpoint: Checkpoint, target: Network, num_taps: int) -> Head:
    width, target_width = config.layers.hidden_size, target.input_embedding.shape[1]
    found, num_inputs = checkpoint.view("fc.weight").shape, num_taps * target_width
    if found != (width, num_inputs):
        raise HeadError(
            f"fc.weight is {' x '.join(map(str, found))}; for {num_taps} hidden states of this "
            f"target, each {target_width} wide, it must be {width} x {num_inputs}"
        )
    first = "midlayer" if "midlayer.hidden_norm.weight" in checkpoint else "layers.0"
    read = Llama(checkpoint, config.layers)
    layers = _layers(config, read, first)
    shared: dict[str, Any] = {
        "fc": checkpoint.linear(num_inputs, {"fc": width}),
        "embedding": read_embedding(config, checkpoint, target),
        "blocks": [block for _, block in layers],
        "norm": read.norm("norm"),
        "output_layer": read_output_layer(config, checkpoint, target),
        "target_ids": read_target_ids(config, checkpoint, target),
        "vocab_size": target.vocab_size,
    }
    if config.block is not None:
        mixers = [mixer for mixer, _ in layers]
        return _block_head(config, config.block, read, mixers, shared)
    if config.kind == "peagle" or "mask_hidden" in checkpoint:
        shared |= _mask(config, checkpoint, shared["embedding"], num_taps, target_width)
    return Eagle3Head(
        fc_norms=_fc_norms(config, read, num_taps, target_width),
        hidden_norm=read.norm(f"{first}.hidden_norm"),
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        **shared,
    )


def _layers(config: HeadConfig, read: Llama, first: str) -> list[tuple[Attention, Block]]:
    """Each layer, behind its attention."""
    layers, block, found = config.layers, config.block, []
    for i, name in enumerate([first, *(f"layers.{i}" for i in range(1, layers.num_hidden_layers))]):
        # In later layers, some trainers give the only norm the other name.
        has_usual_norm = f"{name}.input_layernorm.weight" in read.tensors
        norm = read.norm(f"{name}.{'input_layernorm' if has_usual_norm else 'hidden_norm'}")
        mlp_norm = read.norm(f"{name}.post_attention_layernorm")
        reads_both = block is None and i == 0  # EAGLE-3's first layer reads [e; a]
        window, causal = window_of(layers, i), True
        if block is not None:
            causal = window is not None if block.is_causal is None else block.is_causal
        width = layers.hidden_size * (2 if reads_both else 1)
        options = {"window": window, "causal": causal, "input_width": width}
        if block is None or block.convolution is None:
            mixer = read.mixer(f"{name}.self_attn", norm, i, **options)
            found.append((mixer, Block(mixer, read.mlp(f"{name}.mlp", mlp_norm, i))))
            continue
        mixer = read.mixer(f"{name}.self_attn", None, i, **options)
        mlp = read.mlp(f"{name}.mlp", None, i)
        sizes = dict(zip(("taps", "group"), block.convolution, strict=True))
        convolved = (
            Convolved.read(read.tensors, f"{name}.{which}_conv", part, norm=of, **sizes)
            for which, part, of in (("attention", mixer, norm), ("mlp", mlp, mlp_norm))
        )
        found.append((mixer, Block(*convolved)))
    return found


def _fc_norms(config: HeadConfig, read: Llama, num_taps: int, target_width: int) -> list[Norm]:
    if config.fc_norm or "fc_norm.0.weight" in read.tensors:
        return [read.norm(f"fc_norm.{i}", target_width) for i in range(num_taps)]
    if config.norm_before_fc or "input_norm.weight" in read.tensors:
        return [read.norm("input_norm", num_taps * target_width)]
    return []


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
    check_mask_token(config.mask_token_id, len(embedding))
    return {"mask_hidden": hidden.view(num_taps, width), "mask_token_id": config.mask_token_id}


def _block_head(
    config: HeadConfig,
    block: BlockConfig,
    read: Llama,
    mixers: list[Attention],
    shared: dict[str, Any],
) -> BlockHead:
    check_mask_token(block.mask_token_id, len(shared["embedding"]))
    checkpoint, width = read.tensors, config.layers.hidden_size
    for name, known in (
        ("layers.0.attention_conv.base_kernel", block.convolution),
        ("candidate_selector.successor_codebook", block.selector),
    ):
        if name in checkpoint and known is None:
            raise HeadError(f"its file has {name}, which a {config.kind} head has not")
    markov = _markov_head(config, checkpoint) if block.has_markov else None
    selector = _selector(config, *block.selector, checkpoint) if block.selector else None
    context = []
    for i, mixer in enumerate(mixers):
        layer = mixer.attention
        names = (f"layers.{i}.self_attn.{part}_proj" for part in "kv")
        kv = checkpoint.linear(width, dict.fromkeys(names, layer.num_kv_heads * layer.head_dim))
        context.append(Context(kv, layer, mixer.rope, mixer.head_norms))
    return BlockHead(
        block,
        hidden_norm=read.norm("hidden_norm"),
        context=context,
        chain=markov or selector,
        confidence=_confidence_head(config, markov, checkpoint) if block.has_confidence else None,
        **shared,
    )


def _markov_head(config: HeadConfig, checkpoint: AnyCheckpoint) -> MarkovHead:
    name = "markov_head"
    previous = checkpoint.tensor(f"{name}.markov_w1.weight")
    rank = previous.shape[1]
    check_shape(f"{name}.markov_w1.weight", previous.shape, (config.layers.vocab_size, rank))
    output = checkpoint.linear(rank, {f"{name}.markov_w2": config.draft_vocab_size})
    return MarkovHead(previous, output)


def _selector(config: HeadConfig, rank: int, top_k: int, checkpoint: AnyCheckpoint) -> Selector:
    name, vocab_size = "candidate_selector", config.layers.vocab_size
    if config.draft_vocab_size != vocab_size:
        raise HeadError(
            f"it selects among {config.draft_vocab_size} of {vocab_size} tokens; known here are "
            "selectors among all"
        )
    shape = rank, config.layers.hidden_size
    matrix = checkpoint.tensor(f"{name}.hidden_projection.weight", *shape)
    return Selector(
        predecessors=checkpoint.tensor(f"{name}.predecessor_codebook", vocab_size, rank),
        successors=checkpoint.tensor(f"{name}.successor_codebook", vocab_size, rank),
        projection=Linear(Dense(matrix), None),
        top_k=top_k,
    )


def _confidence_head(
    config: HeadConfig, markov: MarkovHead | None, checkpoint: AnyCheckpoint
) -> ConfidenceHead | None:
    name, width = "confidence_head.proj", config.layers.hidden_size
    if f"{name}.weight" not in checkpoint:
        return None
    weight = checkpoint.tensor(f"{name}.weight").float()
    widths = {width} if markov is None else {width, width + markov.embedding.shape[1]}
    if weight.shape not in {(1, size) for size in widths}:
        check_shape(f"{name}.weight", weight.shape, (1, max(widths)))
    has_bias = f"{name}.bias" in checkpoint
    bias = checkpoint.tensor(f"{name}.bias") if has_bias else weight.new_zeros(1)
    embedding = markov.embedding if markov is not None and weight.shape[1] > width else None
    return ConfidenceHead(weight[0], bias.float(), embedding)


def _read_mtp_head(
    config: ModelConfig, target: Network, report: ReportCounts
) -> tuple[MtpHead, list[int]]:
    """The MTP head in this directory, the target's or one of its own, and the states that it reads:
    the last.

    Raises KeyError naming a tensor that is missing, HeadError naming what does not fit.
    """
    if config.head_layers is not None:
        raise HeadError("it reads the last layer's states: leave draft.head_layers out")
    folder = Path(config.path)
    names = mtp_names(folder)
    hf_config: Any = load_config(folder)
    for key in MTP_COUNTS:
        if hasattr(hf_config, key) and not getattr(hf_config, key):  # as in some quantised copies
            log.warning(
                "%s: %s is %s, but its files hold an MTP head (%s): it drafts",
                config.path,
                key,
                getattr(hf_config, key),
                names.projection,
            )
    _, read = quantised_format(config, hf_config) or (None, None)
    is_known = config.is_mtp and read is not None  # the target's warning was about these weights
    if _rounds(config, target):
        read = rounding(rounds_inputs=True, unless=read)
    checkpoint = open_checkpoint(
        folder, target.dtype, target.device, report, read=read, warns=not is_known
    )
    family = FAMILIES[hf_config.model_type](checkpoint, hf_config)
    width, shape = hf_config.hidden_size, tuple(target.input_embedding.shape)
    if (hf_config.vocab_size, width) != shape:
        raise HeadError(
            f"it was made for {hf_config.vocab_size} tokens and states {width} wide; the target "
            f"has {shape[0]}, and its states are {shape[1]} wide"
        )
    head = MtpHead(
        names=names,
        embedding_norm=family.norm(names.embedding_norm),
        hidden_norm=family.norm(names.hidden_norm),
        fc=checkpoint.linear(2 * width, {names.projection: width}),
        embedding=read_mtp_embedding(hf_config, config.path, checkpoint, target),
        blocks=[family.mtp_block(names.block)],
        norm=family.norm(names.norm),
        output_layer=target.output_layer,
        target_ids=None,
        vocab_size=target.vocab_size,
    )
    if left_out := checkpoint.biases_left_out():
        raise HeadError(
            f"its file has {left_out[0]}, and MTP heads of its type have no such tensor"
        )
    return head, [target.num_layers]

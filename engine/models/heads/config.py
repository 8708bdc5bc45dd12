"""The config of a head, in any of several formats, and the MTP heads inside targets.

A flat config is a Llama's with more keys. The speculators library nests the layer's config inside
its own. Boundary b of a target is its residual stream after b layers; boundary 0 is the embeddings.

An MTP head has no config. It is one more layer in the target's own checkpoint, recognised by the
names of its tensors.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...config import ConfigError, ModelConfig
from ..weight_files import GGUF, holds_gguf, name_in_text, stored_tensors

if TYPE_CHECKING:
    from transformers import LlamaConfig

# The first of these that is part of an architecture's name, or of speculators' name for it.
_NAMED_KINDS = (
    *("mtphead", "eagle3", "peagle", "dflash2", "domino", "dflash", "dspark"),
    *("eagle", "lilicorr", "xpress", "medusa", "hydra", "mlpspeculator"),
)
KINDS = ("eagle3", "peagle", "dflash", "dflash2", "dspark")  # those that can be run
MTP_HEAD = "mtphead"  # an MTP head in a folder of its own, with its target's config
_BLOCK_KINDS = ("dflash", "dflash2", "dspark")
_DEFAULT_BLOCK_SIZE, _SPECULATORS_BLOCK_SIZE = 16, 8
_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")  # trainers' names for it


class MtpNames(NamedTuple):
    """An MTP head in a checkpoint: the names of its layers, and what its projection reads.

    In names, {L} stands for the number of the target's own layers.
    """

    block: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    embedding_first: bool  # [e; h], not [h; e]
    leaves_out_first: bool  # zeros in place of the embedding of the first token that has one before

    def behind(self, num_layers: int | None) -> "MtpNames":
        """The same behind so many layers."""
        each = self._asdict().items()
        named: dict[str, Any] = {k: v for k, v in each if isinstance(v, str)}
        return self._replace(**{k: name.format(L=num_layers) for k, name in named.items()})


_GGUF_PROJECTION = ".nextn.eh_proj.weight"
_MIMO = "model.mtp_layers.0"
_OF_MIMO = MtpNames(
    _MIMO,
    f"{_MIMO}.input_proj",
    f"{_MIMO}.token_layernorm",
    f"{_MIMO}.hidden_layernorm",
    f"{_MIMO}.final_layernorm",
    embedding_first=False,
    leaves_out_first=True,
)
_OF_HYBRIDS = MtpNames(
    "mtp.layers.0",
    "mtp.fc",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.norm",
    embedding_first=True,
    leaves_out_first=False,
)
_GLM = "model.layers.{L}"
# Copies of the embedding and of the output layer beside it are not read: as in SGLang's
# glm4_moe_nextn.py, these are the target's.
_OF_GLM = MtpNames(
    _GLM,
    f"{_GLM}.eh_proj",
    f"{_GLM}.enorm",
    f"{_GLM}.hnorm",
    f"{_GLM}.shared_head.norm",
    embedding_first=True,
    leaves_out_first=False,  # vLLM's does; it concerns the first token of a text alone
)
# By model type of the targets whose MTP heads are known.
_HYBRIDS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
MTP_HEADS = {"mimo": _OF_MIMO, "glm4_moe": _OF_GLM, **dict.fromkeys(_HYBRIDS, _OF_HYBRIDS)}
MTP_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # a config's keys of its layers
# Keys that say what the head is, not what its layers are; a LlamaConfig ignores the unknown ones.
_LEFT_OUT = ("architectures", "auto_map", "model_type", "torch_dtype")


class HeadError(ConfigError):
    """The head is damaged, unknown, or made for another target; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The settings of a head that drafts blocks, besides its layers."""

    kind: str  # an entry of KINDS
    size: int  # rows of a block in training, including the anchor
    mask_token_id: int
    predicts_from_anchor: bool  # a row predicts the next token, not the one at its own position
    # Whether rows of a block see only those before them; None: in layers with a window.
    is_causal: bool | None
    embedding_scale: float
    logit_scale: float
    softcap: float | None  # of logits
    # Of a DFlash2 head.
    convolution: tuple[int, int] | None  # taps, and channels of a group
    selector: tuple[int, int] | None  # its rank, and how many candidates a row has
    has_markov: bool
    has_confidence: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head's config, read from any of the formats."""

    kind: str  # an entry of KINDS
    layers: "LlamaConfig"  # of its decoder layers
    draft_vocab_size: int
    boundaries: tuple[int, ...] | None  # those that it reads, ascending; None: EAGLE-3's default
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token_id: int | None  # of a P-EAGLE head
    block: BlockConfig | None  # of a head that drafts blocks

    @staticmethod
    def load(folder: Path) -> "HeadConfig":
        """Raises HeadError."""
        config = json.loads((folder / "config.json").read_text())
        kind = _kind(config)
        if kind not in KINDS:
            raise HeadError(
                f"it is a head of kind {kind}; of heads, {', '.join(KINDS)} ones are run"
            )
        inner = config.get("transformer_layer_config")
        layers = _layers(inner if isinstance(inner, dict) else config)
        return HeadConfig(
            kind=kind,
            layers=layers,
            draft_vocab_size=config.get("draft_vocab_size") or layers.vocab_size,
            boundaries=_boundaries(config),
            norm_before_residual=bool(config.get("norm_before_residual")),
            norm_before_fc=bool(config.get("norm_before_fc")),
            fc_norm=bool(config.get("fc_norm")),
            norm_output=bool(config.get("norm_output")),
            mask_token_id=next(
                (i for i in map(config.get, _MASK_TOKENS) if isinstance(i, int)), None
            ),
            block=_block(config, kind, layers) if kind in _BLOCK_KINDS else None,
        )

    def boundaries_of(self, num_layers: int) -> tuple[int, ...]:
        """The boundaries that it reads of a target with this many layers. Raises HeadError."""
        named = self.boundaries
        if named is None and self.block is not None:
            raise HeadError("its config names no layers of the target to read (target_layer_ids)")
        found = named or tuple(sorted((2, num_layers // 2, num_layers - 3)))
        if not all(0 <= b <= num_layers for b in found) or len(set(found)) < len(found):
            raise HeadError(
                f"it reads the hidden states after layers {', '.join(map(str, found))}"
                f"{'' if named else ', as heads do whose config names none'}, but the target has "
                f"{num_layers} layers"
            )
        return found

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises HeadError if the head was made for another vocabulary than the target's."""
        if self.layers.vocab_size != vocab_size:
            raise HeadError(
                f"it was made for a vocabulary of {self.layers.vocab_size} tokens, the target has "
                f"{vocab_size}"
            )


def head_kind(folder: str | Path) -> str | None:
    """The kind of head in this model directory; None if it holds an ordinary model."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return None  # loading it as a model will report the error
    return _kind(config) if isinstance(config, dict) else None


def is_head(draft: ModelConfig) -> bool:
    """Whether a draft is a head, or a model of its own."""
    return draft.is_mtp or head_kind(draft.path) is not None


def _kind(config: dict[str, Any]) -> str | None:
    if config.get("selector_rank") or _nested(config).get("selector_rank"):
        return "dflash2"  # some carry the name of the kind that they extend
    if (projector := _nested(config).get("projector_type")) not in (None, "dflash"):
        return str(projector)
    # Whatever they are: a list of names, mostly.
    named = f"{config.get('speculators_model_type')} {config.get('architectures')}"
    joined = named.lower().replace("_", "")
    return next((kind for kind in _NAMED_KINDS if kind in joined), None)


def _layers(config: dict[str, Any]) -> "LlamaConfig":
    # These take seconds to import, and `head_kind` does not need them.
    from transformers import LlamaConfig

    from ..architectures import STATIC_ROPE, invalid_config_as_value_error

    kept = {
        key: value for key, value in config.items() if key not in _LEFT_OUT and value is not None
    }
    if kept.get("hidden_act", "silu") != "silu":
        raise HeadError(f"its activation is {kept['hidden_act']}; silu is known here")
    if not (kept.get("layer_types") or kept.get("use_sliding_window")):
        kept.pop("sliding_window", None)  # some families set it without using it
    try:
        with invalid_config_as_value_error():
            layers = LlamaConfig(**kept)
        if layers.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {layers.num_hidden_layers}")
    except (TypeError, ValueError, KeyError) as error:
        raise HeadError(f"its config describes no layer: {error}") from error
    rope_type = (layers.rope_parameters or {}).get("rope_type")
    if rope_type not in STATIC_ROPE:
        raise HeadError(f"its RoPE is {rope_type}; known are {', '.join(sorted(STATIC_ROPE))}")
    rotated = kept.get("partial_rotary_factor") or (layers.rope_parameters or {}).get(
        "partial_rotary_factor"
    )
    if rotated not in (None, 1):
        raise HeadError(f"its RoPE rotates {rotated} of a head; here it rotates the whole")
    return layers


def _boundaries(config: dict[str, Any]) -> tuple[int, ...] | None:
    """The boundaries; formats count from the embeddings, or from the first layer's output."""
    inner = config.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise HeadError(f"its eagle_config is {inner!r}; it must be an object")
    layers = config.get("target_layer_ids") or _nested(config).get("target_layer_ids")
    states = config.get("aux_hidden_state_layer_ids") or config.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    found = layers or states or inner.get("eagle_aux_hidden_state_layer_ids")
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
        raise HeadError(f"its layer ids are {found}; they must be integers, in a list")
    # Lists of eagle_config that begin at 1 come from a trainer that counts layers, not states.
    counts_layers = layers or (not states and found[0] == 1)
    return tuple(sorted(i + 1 if counts_layers else i for i in found))


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """The place where some trainers put the settings of a block head."""
    inner = config.get("dflash_config")
    return inner if isinstance(inner, dict) else {}


def _block(config: dict[str, Any], kind: str, layers: "LlamaConfig") -> BlockConfig:
    own = config | _nested(config)
    is_speculators = "speculators_model_type" in config
    mask_token_id = own.get("mask_token_id")
    if not isinstance(mask_token_id, int):
        raise HeadError("its config names no mask token (mask_token_id)")
    size = own.get("block_size")
    if size is None:
        size = _SPECULATORS_BLOCK_SIZE if is_speculators else _DEFAULT_BLOCK_SIZE
    # Native DSpark heads predict from the anchor unless they say otherwise; all others do not.
    from_anchor = own.get("sample_from_anchor", own.get("query_zero_predicts_next"))
    if from_anchor is None:
        from_anchor = kind == "dspark" and not is_speculators
    if not isinstance(size, int) or size < (1 if from_anchor else 2):
        raise HeadError(f"its block_size is {size}, which leaves no row to draft from")
    if own.get("causal_head"):
        raise HeadError("it is a causal head (causal_head), which drafts in another way")
    is_causal = own.get("is_causal", own.get("causal"))
    if is_causal is None and own.get("sliding_window_non_causal"):
        is_causal = False
    has_markov = bool(own.get("markov_rank"))
    if has_markov and (markov := own.get("markov_head_type") or "vanilla") != "vanilla":
        raise HeadError(f"its Markov head is of type {markov}; only vanilla ones are known")
    if (mode := own.get("attention_mode")) not in (None, "gqa", "mha"):
        raise HeadError(f"its attention is {mode}; gqa is known here")
    convolution = selector = None
    if kind == "dflash2":
        if has_markov or own.get("enable_confidence_head"):
            raise HeadError("it has a selector, and a Markov or confidence head beside it")
        width, vocab_size = layers.hidden_size, layers.vocab_size
        convolution = _size(own, "conv_kernel_size", size), _size(own, "conv_group_size", width)
        if width % convolution[1]:
            raise HeadError(f"its conv_group_size is {convolution[1]}, which must divide {width}")
        selector = _size(own, "selector_rank"), _size(own, "selector_top_k", vocab_size)
    return BlockConfig(
        kind=kind,
        size=size,
        mask_token_id=mask_token_id,
        predicts_from_anchor=bool(from_anchor),
        is_causal=is_causal,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        logit_scale=float(own.get("output_multiplier") or 1.0),
        softcap=float(own.get("final_logit_softcapping") or 0.0) or None,
        convolution=convolution,
        selector=selector,
        has_markov=has_markov,
        has_confidence=bool(own.get("enable_confidence_head")),
    )


def _size(own: dict[str, Any], key: str, most: int | None = None) -> int:
    """A positive integer of the config. Raises HeadError."""
    size = own.get(key)
    if not isinstance(size, int) or size < 1 or (most is not None and size > most):
        limit = "1 or more" if most is None else f"1 to {most}"
        raise HeadError(f"its {key} is {size}; it must be {limit}")
    return size


def mtp_names(folder: Path) -> MtpNames:
    """The names of the MTP head in a model directory.

    Raises HeadError if it holds none that is known here, or if its files are damaged.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        names = _stored_names(folder)
    except (OSError, ValueError) as error:
        raise HeadError(str(error)) from None
    model_type = config.get("model_type")
    if model_type not in MTP_HEADS:
        known = ", ".join(MTP_HEADS)
        raise HeadError(
            f"no MTP head is known for models of type {model_type}; known are those of {known}"
        )
    for key in MTP_COUNTS:
        if (num_layers := (config.get("text_config") or config).get(key) or 0) > 1:
            raise HeadError(f"its MTP head has {num_layers} layers; one is read here")
    found = MTP_HEADS[model_type].behind(config.get("num_hidden_layers"))
    name = f"{found.projection}.weight"
    if not any(each == name or each.endswith(_GGUF_PROJECTION) for each in names):
        raise HeadError(
            f"its files hold no MTP head ({name}), which quantised and fine-tuned checkpoints "
            "often leave out"
        )
    return found


def _stored_names(folder: Path) -> Iterable[str]:
    """The names of its tensors; those of a GGUF file as they are there.

    Raises ValueError if a file is damaged.
    """
    if holds_gguf(folder):
        from ..gguf_file import GgufFile  # imports torch: seconds

        return GgufFile(folder / GGUF).entries
    return map(name_in_text, stored_tensors(folder))

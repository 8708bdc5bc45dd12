"""What all families have in common, and what one of them writes down: see `llama.py`."""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.kernels.model.rms_norm import Norm

from ..admission import LAYER_TYPES, UnsupportedModelError, layers_differ, ropes_of
from ..architectures import STATIC_ROPE
from ..attention import Rope
from ..blocks import Block
from ..checkpoint import EMBEDDING, OUTPUT_LAYER, AnyCheckpoint
from ..decoder import Decoder

# Declared fields that do not change the forward pass.
_NEUTRAL = {
    "attention_dropout", "bos_token_id", "embd_pdrop", "eos_token_id", "initializer_range",
    "output_router_logits", "pad_token_id", "pretraining_tp", "resid_pdrop", "residual_dropout",
    "router_aux_loss_coef", "router_jitter_noise", "use_cache",
}  # fmt: skip
# Fields from which transformers computes inv_freq and its scaling, which we take from there.
_ROPE = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor",
    "mscale", "mscale_all_dim", "original_max_position_embeddings", "rope_theta", "rope_type",
    "truncate", "type",
}  # fmt: skip
_KV_HEADS = "num_key_value_heads"  # of which ranks may have copies
# Counts that transformers' classes let be null.
_NEVER_NULL = {"mamba_n_groups", "num_experts_per_tok"}
_STATE_DTYPES = "mamba_ssm_dtype", "mamba_ssm_cache_dtype"


class Family(ABC):
    """Models of one structure: the fields of their config, and the parts of their layers.

    Names of tensors and modules are transformers'.
    """

    model_types: ClassVar[tuple[str, ...]]
    # The declared fields of a config that the family implements: its code sees no others.
    fields: ClassVar[frozenset[str]] = frozenset({
        "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
        "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers",
        "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
        "vocab_size",
    })  # fmt: skip
    # Those that the configs of its types do not declare, where other models have a choice: no code
    # for them reads these.
    fixed: ClassVar[Mapping[str, Any]] = {"scoring_func": "softmax", "topk_method": "greedy"}
    # Fields that count what ranks share.
    per_rank: ClassVar[frozenset[str]] = frozenset({
        "intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
        "moe_intermediate_size", "num_attention_heads", _KV_HEADS,
        "shared_expert_intermediate_size",
    })  # fmt: skip
    layer_types: ClassVar[frozenset[str]] = frozenset(LAYER_TYPES)  # that it implements
    rope_fields: ClassVar[frozenset[str]] = frozenset()  # of RoPE, beside those of all models
    rotary: ClassVar[type] = LlamaRotaryEmbedding  # transformers', which knows those
    activations: ClassVar[Mapping[str, str]] = {"hidden_act": "silu"}  # the only ones, by field
    # Fields that do not change the forward pass of these models, beside those of all models.
    neutral: ClassVar[frozenset[str]] = frozenset()
    only_format: ClassVar[str | None] = None  # of its experts; None: they may be plain, or in any
    # What transformers calls the embedding and the last norm.
    embedding: ClassVar[str] = EMBEDDING
    last_norm: ClassVar[str] = "model.norm"
    # Parts of tensors' names in files, and what transformers calls them.
    renamed: ClassVar[dict[str, str]] = {}

    def __init__(self, tensors: AnyCheckpoint, config: Any) -> None:
        """`config` is transformers', for which `why_unknown` returns None."""
        size = tensors.share.size
        self.tensors, self._given = tensors, self.share_of(config, size)
        declared = {**self.fixed, **_declared(self._given)}
        # Of the share that `tensors` reads.
        self.config = SimpleNamespace(**{name: declared.get(name) for name in self.fields})
        self.config.head_dim = _head_dim(config)
        self.config.num_hidden_layers = config.num_hidden_layers  # not declared by all
        self.kv_copies = max(1, size // config.num_key_value_heads)

    @classmethod
    def share_of(cls, config: PreTrainedConfig, size: int) -> PreTrainedConfig:
        """The configuration of what each of `size` ranks has of this model."""
        if size == 1:
            return config
        head_dim = _head_dim(config)
        config = copy.deepcopy(config)
        config.head_dim = head_dim
        for name, count in cls._counts(config).items():
            setattr(config, name, max(1, count // size))
        return config

    @classmethod
    def compared(cls, config: PreTrainedConfig) -> PreTrainedConfig:
        """That with which transformers' code computes what is right, if `config` is not."""
        return config

    @classmethod
    def cut_by(cls, config: PreTrainedConfig, size: int) -> list[str]:
        """What so many ranks could not share, each with its number."""
        return [
            f"{name} {count}"
            for name, count in cls._counts(config).items()
            if count % size and not (name == _KV_HEADS and size % count == 0)
        ]

    @classmethod
    def _counts(cls, config: PreTrainedConfig) -> dict[str, int]:
        """What ranks share, by its field."""
        counts = ((name, getattr(config, name)) for name in cls.per_rank & _declared(config).keys())
        return {name: count for name, count in sorted(counts) if count}

    @classmethod
    def check_fixed(cls, config: PreTrainedConfig) -> None:
        """Refuse what is stated and not computed; raises UnsupportedModelError."""
        for name, value in cls.fixed.items():
            if (stated := getattr(config, name, value)) not in (value, None):
                raise UnsupportedModelError(
                    f"its {name} is {stated}; models of type {config.model_type} have {value}"
                )

    @classmethod
    def why_unknown(cls, config: PreTrainedConfig) -> str | None:
        """What the config says that this family does not implement; None if there is nothing."""
        if layers_differ(config):
            return "its layers differ (per_layer_config)"
        declared = _declared(config)
        for name in sorted(_NEVER_NULL & declared.keys()):
            if declared[name] is None:
                return f"its {name} is null"
        for name in _STATE_DTYPES:
            if (dtype := getattr(config, name, None)) not in (None, "float32"):
                return f"its state is kept in {dtype}; here it is float32"
        given = {name for name, value in declared.items() if value not in (None, False)}
        if unknown := sorted(given - cls.fields - cls.neutral - _NEUTRAL):
            return f"its config has {', '.join(unknown)}"
        if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - cls.layer_types):
            return f"it has layers of type {', '.join(unknown)}"
        for rope in ropes_of(config).values():
            whole = {"partial_rotary_factor"} if rope.get("partial_rotary_factor") == 1 else set()
            if unknown := sorted(set(rope) - _ROPE - cls.rope_fields - whole):
                return f"its RoPE has {', '.join(unknown)}"
            rope_type = str(rope.get("rope_type", "default"))
            if rope_type not in STATIC_ROPE:
                return f"its RoPE is {rope_type}"
        for field, known in cls.activations.items():
            if (activation := getattr(config, field)) != known:
                return f"its activation is {activation}"
        return None

    @abstractmethod
    def block(self, name: str, layer: int) -> Block:
        """A layer, whose tensors' names begin with `name`; the config describes it as `layer`.

        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape.
        """

    def mtp_block(self, name: str) -> Block:
        """The layer of the model's MTP head, whose tensors' names begin with `name`."""
        return self.block(name, 0)

    def decoder(self) -> Decoder:
        """The whole model.

        As in transformers, an output layer in the file that differs from the embedding is not tied
        to it; the configuration says so from then on. Raises as `block` does.
        """
        config, given, tensors = self.config, self._given, self.tensors
        blocks = [self.block(f"model.layers.{i}", i) for i in range(config.num_hidden_layers)]
        embedding = tensors.tensor(
            f"{self.embedding}.weight", config.vocab_size, config.hidden_size
        )
        # The first rank alone computes logits: for others any matrix will do.
        is_first = tensors.share.rank == 0
        if is_first and given.tie_word_embeddings and f"{OUTPUT_LAYER}.weight" in tensors:
            own = tensors.stacked(f"{OUTPUT_LAYER}.weight")
            given.tie_word_embeddings = torch.equal(own, embedding)
        if given.tie_word_embeddings or not is_first:
            output_layer = tensors.tied(embedding)
        else:
            output_layer = tensors.linear(config.hidden_size, {OUTPUT_LAYER: config.vocab_size})
        return Decoder(embedding, blocks, self.norm(self.last_norm), output_layer)

    def norm(self, name: str, size: int | None = None) -> Norm:
        """A norm; of the residual stream, if no size is given."""
        config = self.config
        return self.tensors.norm(name, size or config.hidden_size, config.rms_norm_eps)

    @functools.cached_property
    def ropes(self) -> dict[str, Rope]:
        """By type of layer, or one for all by the name "": layers share its cosines and sines."""
        found = {}
        for layer_type, parameters in ropes_of(self._given).items():
            config = copy.copy(self._given)
            config.rope_parameters = parameters
            rotary = self.rotary(config)
            inv_freq = rotary.inv_freq.float().to(self.tensors.device)
            found[layer_type] = Rope(inv_freq, rotary.attention_scaling)
        return found

    @property
    def rope(self) -> Rope:
        """That of all layers. Raises ValueError if it differs by their type."""
        if "" not in self.ropes:
            raise ValueError(f"its RoPE is of {', '.join(self.ropes)}; here all layers have one")
        return self.ropes[""]

    @functools.cached_property
    def no_rope(self) -> Rope:
        """It rotates by 0 at every position."""
        return Rope(torch.zeros(self.config.head_dim // 2, device=self.tensors.device), 1.0)


def _head_dim(config: Any) -> int:
    """Read by transformers whether or not it is declared."""
    declared: int | None = getattr(config, "head_dim", None)
    return declared or int(config.hidden_size // config.num_attention_heads)


def window_of(config: Any, layer: int) -> int | None:
    """How many tokens a row of this layer attends to, its own included; None: all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _declared(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that the class of this configuration adds to those of all models.

    transformers' code for the model reads only these; a config.json may have others.
    """
    common = {field.name for field in fields(PreTrainedConfig)}
    names = {field.name for field in fields(config)} - common
    return {name: getattr(config, name) for name in names}

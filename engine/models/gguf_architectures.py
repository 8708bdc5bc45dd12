"""How GGUF files store models of each architecture: names, and what is stored in another way."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider.kernels.cpu.packing import Codes

from .checkpoint import EMBEDDING, OUTPUT_LAYER
from .unread import layer_of

_OUTER = {EMBEDDING: "token_embd", "model.norm": "output_norm", OUTPUT_LAYER: "output"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_ATTENTION = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {
    "self_attn.o_proj": "attn_output"
}
_HEAD_NORMS = {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
_PARTS = ("gate", "up", "down")
_MLP = {f"mlp.{part}_proj": f"ffn_{part}" for part in _PARTS}
_EXPERTS = {f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in _PARTS} | {
    "mlp.gate": "ffn_gate_inp"
}
_SHARED = {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in _PARTS} | {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp"
}
_DELTA_NET = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_MTP = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}
_MTP_LAYER = "mtp.layers.0."
_PARAMETERS = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts)\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


class Place(NamedTuple):
    """Where a tensor lies."""

    name: str  # of the file's tensor
    part: int | None = None  # the entry of its first dimension; None: all of it

    @property
    def stem(self) -> str:
        """The name without its layer and `.weight`."""
        found = _BLOCK.fullmatch(self.name)
        return (found[2] if found else self.name).removesuffix(".weight")


class LlamaFile:
    """Rows of queries and keys lie as pairs, which RoPE rotates; in transformers, as halves."""

    inner: ClassVar[dict[str, str]] = _NORMS | _ATTENTION | _MLP
    is_compiled: ClassVar[bool] = True  # by layers that take one matrix where these stack several
    _HEADS: ClassVar[dict[str, str]] = {
        "attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"
    }  # fmt: skip

    def __init__(self, name: str, metadata: Mapping[str, Any]) -> None:
        self._name, self._metadata = name, metadata

    def value(self, key: str) -> Any:
        """Raises KeyError."""
        return self._metadata[f"{self._name}.{key}"]

    @property
    def num_layers(self) -> int:
        """Of the model; behind them are those of an MTP head."""
        num_mtp = self._metadata.get(f"{self._name}.nextn_predict_layers", 0)
        return int(self.value("block_count")) - int(num_mtp)

    def place(self, name: str) -> Place:
        """Where the tensor of transformers' name lies, if it is there."""
        found = _LAYER.fullmatch(name)
        if found is None:
            stem, _, kind = name.rpartition(".")
            return Place(f"{_OUTER.get(stem, stem)}.{kind}")
        rest, part = found[2], None
        if rest in _PARAMETERS:
            return Place(f"blk.{found[1]}.{_PARAMETERS[rest]}")
        if expert := _EXPERT.fullmatch(rest):
            rest, part = f"{expert[1]}.{expert[3]}", int(expert[2])
        stem, _, kind = rest.rpartition(".")
        return Place(f"blk.{found[1]}.{self.inner.get(stem, stem)}.{kind}", part)

    def is_known(self, name: str) -> bool:
        """Whether the file's tensor is one that this architecture has."""
        found = _BLOCK.fullmatch(name)
        if self.num_layers <= layer_of(name) < self.value("block_count"):
            return True  # an MTP head's
        known = {f"{stem}.weight" for stem in (self.inner if found else _OUTER).values()}
        return (found[2] if found else name) in known

    def missing(self, names: Mapping[str, Any]) -> list[str]:
        """The file's tensors that are not there, by their names."""
        stems = [_OUTER[EMBEDDING], _OUTER["model.norm"]]
        for i in range(self.num_layers):
            stems += [f"blk.{i}.{stem}" for stem in self._stems(i, names)]
        return [name for name in (f"{stem}.weight" for stem in stems) if name not in names]

    def _stems(self, layer: int, names: Mapping[str, Any]) -> list[str]:
        return list(self.inner.values())

    def shape(self, place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
        """That of transformers' tensor, given the file's.

        Raises ValueError if it has another number of experts than the metadata say.
        """
        if place.part is None:
            return shape
        if shape[0] != (count := self.value("expert_count")):
            raise ValueError(
                f"{place.name} has {shape[0]} experts; by its metadata it must have {count}"
            )
        return shape[1:]

    def restored(self, place: Place, codes: Codes) -> Codes:
        """The numbers as transformers has them."""
        if place.stem not in self._HEADS:
            return codes
        key = f"{self._name}.{self._HEADS[place.stem]}"
        num_heads = self._metadata.get(key) or self.value(self._HEADS["attn_q"])
        return Codes(*(_unpermuted(part, num_heads) for part in codes if part is not None))


class Qwen3File(LlamaFile):
    """Queries and keys lie as in transformers."""

    inner = _NORMS | _ATTENTION | _HEAD_NORMS | _MLP

    def restored(self, place: Place, codes: Codes) -> Codes:
        return codes


class MixtureFile(Qwen3File):
    """Qwen3's mixtures."""

    inner = _NORMS | _ATTENTION | _HEAD_NORMS | _EXPERTS
    is_compiled = False


class HybridFile(Qwen3File):
    """Norms are stored with 1 added, A_log as -exp(A_log), and value heads in another order.

    Here the value heads of a key head are neighbours; in the file, the first ones of all key heads.
    """

    inner = (
        _NORMS | {"post_attention_layernorm": "post_attention_norm"}
        | _ATTENTION | _HEAD_NORMS | _MLP | _DELTA_NET
    )  # fmt: skip
    is_compiled = False
    _ADDS_ONE: ClassVar[set[str]] = {
        "attn_norm", "attn_k_norm", "attn_q_norm", "nextn.enorm", "nextn.hnorm",
        "nextn.shared_head_norm", "output_norm", "post_attention_norm",
    }  # fmt: skip

    def place(self, name: str) -> Place:
        if name.startswith(_MTP_LAYER):
            name = name.replace(_MTP_LAYER, f"model.layers.{self.num_layers}.")
        stem, _, kind = name.rpartition(".")
        if stem in _MTP:
            return Place(f"blk.{self.num_layers}.{_MTP[stem]}.{kind}")
        return super().place(name)

    def is_known(self, name: str) -> bool:
        stem = Place(name).stem
        return stem in _PARAMETERS.values() or super().is_known(name)

    def missing(self, names: Mapping[str, Any]) -> list[str]:
        found = super().missing(names)
        for i in range(self.num_layers):
            if self._is_delta_net(i, names):
                each = (f"blk.{i}.{stem}" for stem in _PARAMETERS.values())
                found += [name for name in each if name not in names]
        return found

    def _stems(self, layer: int, names: Mapping[str, Any]) -> list[str]:
        others = _ATTENTION | _HEAD_NORMS if self._is_delta_net(layer, names) else _DELTA_NET
        return [stem for stem in self.inner.values() if stem not in others.values()]

    def _is_delta_net(self, layer: int, names: Mapping[str, Any]) -> bool:
        return any(f"blk.{layer}.{stem}" in names for stem in ("ssm_a", "ssm_out.weight"))

    def shape(self, place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
        if place.stem == "ssm_conv1d":
            return (shape[0], 1, *shape[1:])
        if place.stem == "ffn_gate_inp_shexp":
            return (1, shape[-1])
        return super().shape(place, shape)

    def restored(self, place: Place, codes: Codes) -> Codes:
        stem = place.stem
        if stem in self._ADDS_ONE:
            return Codes(codes.dequantised() - 1)
        if stem == "ssm_a":
            if not bool((codes.dequantised() < 0).all()):
                raise ValueError(f"{place.name} must be below 0: it is -exp(A_log)")
            codes = Codes((-codes.dequantised()).log())
        num_keys, num_values = self.value("ssm.group_count"), self.value("ssm.time_step_rank")
        key_dim, value_dim = (
            self.value("ssm.state_size"),
            self.value("ssm.inner_size") // num_values,
        )
        # By our head, the file's.
        heads = torch.arange(num_values).view(-1, num_keys).t().flatten()
        values = (heads[:, None] * value_dim + torch.arange(value_dim)).flatten()
        num_others = 2 * num_keys * key_dim
        channels = torch.cat((torch.arange(num_others), num_others + values))
        orders = {
            "attn_qkv": channels, "ssm_conv1d": channels, "attn_gate": values, "ssm_alpha": heads,
            "ssm_beta": heads, "ssm_a": heads, "ssm_dt.bias": heads, "ssm_out": values,
        }  # fmt: skip
        if stem not in orders:
            return codes
        of_columns = {"ssm_a": 1, "ssm_dt.bias": 1, "ssm_out": value_dim}  # neighbours that stay so
        found = codes.codes.shape[stem in of_columns]
        if found != len(orders[stem]):
            raise ValueError(
                f"{place.name} has {found} {'columns' if stem in of_columns else 'rows'}; by its "
                f"metadata it must have {len(orders[stem])}"
            )
        if stem in of_columns:
            return _columns(codes, orders[stem], of_columns[stem])
        return Codes(*(part[orders[stem]] for part in codes if part is not None))


class HybridMixtureFile(HybridFile):
    """Its MLPs are experts, one of which all rows share."""

    inner: ClassVar[dict[str, str]] = {
        name: stem for name, stem in HybridFile.inner.items() if name not in _MLP
    } | (_EXPERTS | _SHARED)


ARCHITECTURES: dict[str, type[LlamaFile]] = {
    "llama": LlamaFile,
    "qwen3": Qwen3File,
    "qwen3moe": MixtureFile,
    "qwen35": HybridFile,
    "qwen35moe": HybridMixtureFile,
}


def architecture_of(metadata: Mapping[str, Any]) -> LlamaFile | None:
    """How this file stores its model; None if that is not known here."""
    name = str(metadata.get("general.architecture"))
    return ARCHITECTURES[name](name, metadata) if name in ARCHITECTURES else None


def _unpermuted(rows: Tensor, num_heads: int) -> Tensor:
    pairs: Tensor = rows.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _columns(codes: Codes, order: Tensor, together: int) -> Codes:
    """`together`: as many neighbours stay together."""
    if codes.scale is None:
        return Codes(codes.codes[:, order])
    group = codes.codes.shape[1] // codes.scale.shape[1]
    if together % group:  # a group would be torn apart
        return Codes(codes.dequantised()[:, order])
    scales = order[::group] // group
    others = (part[:, scales] for part in (codes.scale, codes.offset) if part is not None)
    return Codes(codes.codes[:, order], *others)

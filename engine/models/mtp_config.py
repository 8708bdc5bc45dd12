"""MTP heads on disk: layers of a target's own checkpoint that predict a token further ahead.

To add a family, enter its dialect in DIALECTS.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .head_config import HeadError


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpDialect:
    """Names of the tensors of a family's MTP head, and how it combines its inputs."""

    layer: str  # what the names of its decoder layer begin with
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str  # the last one
    hidden_first: bool  # the projection reads [h; e], not [e; h]
    zeroes_first: bool  # in row 0, zeros take the place of the embedding
    norm_offset: float = 0.0  # is added to the weights of these three norms


_MIMO = "model.mtp_layers.0"
# By the target's model type.
DIALECTS = {
    "mimo": MtpDialect(
        layer=_MIMO,
        projection=f"{_MIMO}.input_proj",
        embedding_norm=f"{_MIMO}.token_layernorm",
        hidden_norm=f"{_MIMO}.hidden_layernorm",
        norm=f"{_MIMO}.final_layernorm",
        hidden_first=True,
        zeroes_first=True,
    ),
}


def mtp_dialect(folder: Path) -> MtpDialect:
    """The dialect of the MTP head in this model directory; raises HeadError if there is none."""
    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type not in DIALECTS:
        raise HeadError(
            f"no MTP head is known for models of type {model_type}; known are those of "
            f"{', '.join(DIALECTS)}"
        )
    dialect = DIALECTS[model_type]
    name = f"{dialect.projection}.weight"
    if name not in _tensor_names(folder):
        raise HeadError(
            f"its files hold no MTP head ({name}), which quantised and fine-tuned checkpoints "
            "often leave out"
        )
    return dialect


def _tensor_names(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text())["weight_map"])
    single = folder / "model.safetensors"
    if not single.is_file():
        return set()  # a GGUF file, say
    try:
        with safe_open(single, "np") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise HeadError(f"{single.name} is damaged or cut short ({error})") from None

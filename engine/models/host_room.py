"""Whether models fit in a CPU's memory, asked before any of their tensors is read.

Else the kernel would end the process in the middle, without a word. What is counted is copied for
certain: the pages of mapped files are dropped when memory runs short.
"""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from outrider.kernels.cpu.layers import compiled
from outrider.kernels.model.packed_linear import has_products

from ..config import ConfigError, EngineConfig, ModelConfig
from ..host_memory import obtainable_bytes
from .admission import resolve_dtype
from .architectures import load_config
from .families import why_unknown
from .formats import take_format
from .gguf_architectures import architecture_of
from .gguf_file import FILE_NAME, GgufFile, holds_gguf
from .heads.config import is_head
from .model_classes import AutoModelForCausalLM
from .weight_files import stored_tensors

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_MOST_GROWTH = 16  # from 2 bits to float32
# Of which our decoder reads experts in MXFP4 alone: transformers has the others.
_MXFP4_ALONE = "gpt_oss"
_STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def check_host_room(config: EngineConfig) -> None:
    """Raises ConfigError if the models of a CPU need more memory than it can have.

    Heads are not counted: they are small beside their target.
    """
    left = obtainable_bytes()
    models = dict(_models_of(config))
    if left is None or _MOST_GROWTH * sum(map(_file_bytes, models.values())) <= left:
        return
    needed = {role: _copied_bytes(model) for role, model in models.items()}
    if (total := sum(needed.values())) <= left:
        return
    roles = [role for role, size in needed.items() if size]
    narrower = [
        f'{role}.dtype = "bfloat16" (half of the memory, but it may be slow here)'
        for role in roles
        if _is_unpacked(models[role]) and _dtype_of(models[role]) == torch.float32
    ]
    works = ", ".join(["a GGUF file of 4 bits", *narrower, "a smaller model"])
    verb = "needs" if len(roles) == 1 else "need"
    raise ConfigError(
        f"{' and '.join(roles)} {verb} about {total / 1e9:.3g} GB of memory, and "
        f"{left / 1e9:.3g} GB are left: take {works}, or a GPU"
    )


def _models_of(config: EngineConfig) -> Iterator[tuple[str, ModelConfig]]:
    yield "target", config.target
    draft = config.loaded_draft
    if draft is not None and not is_head(draft):
        yield "draft", draft


def _file_bytes(model: ModelConfig) -> int:
    """Of all files, read or not."""
    return sum(path.stat().st_size for path in Path(model.path).rglob("*") if path.is_file())


def _copied_bytes(model: ModelConfig) -> int:
    """The memory of its weights that are copied, at least; 0 if loading will refuse the model."""
    try:
        if not _is_unpacked(model):
            return (Path(model.path) / FILE_NAME).stat().st_size
        config, dtype = _config_of(model), _dtype_of(model)
        take_format(config, Path(model.path))
        with torch.device("meta"):
            empty: nn.Module = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=model.trust_remote_code
            )
        return sum(_weight_bytes(empty, config, model, dtype))
    except Exception:  # whatever it is, loading says it better
        log.debug("%s: its memory was not counted", model.path, exc_info=True)
        return 0


def _weight_bytes(
    empty: nn.Module, config: PreTrainedConfig, model: ModelConfig, dtype: torch.dtype
) -> Iterator[int]:
    """Of each weight that our decoder or transformers copies; `empty` is the model without any."""
    folder = Path(model.path)
    is_gguf = holds_gguf(folder)
    stored = {} if is_gguf or not any(folder.glob("*.safetensors")) else stored_tensors(folder)
    is_converted = all(each.dtype != _STORED_AS[dtype] for each in stored.values())
    is_ours = why_unknown(config) is None
    if config.model_type == _MXFP4_ALONE:
        is_ours = any(name.endswith("_blocks") for name in stored)
    if is_gguf or is_ours or (stored and is_converted):
        for name, weight in empty.named_parameters():
            # Experts in MXFP4 stay in it, and are unpacked in each pass.
            narrow = [stored.get(f"{name}_{part}") for part in ("blocks", "scales")]
            sizes = [each.end - each.start for each in narrow if each is not None]
            yield sum(sizes) if sizes else weight.numel() * dtype.itemsize
    elif has_products(dtype):  # only what is packed; transformers keeps views of the files
        for module in empty.modules():
            if type(module) is nn.Linear:
                yield module.weight.numel() * dtype.itemsize


def _is_unpacked(model: ModelConfig) -> bool:
    """Whether all weights take the model's dtype; those of a GGUF file may stay narrow."""
    if compiled() is None or not holds_gguf(folder := Path(model.path)):
        return True
    return architecture_of(GgufFile(folder / FILE_NAME).metadata) is None


def _config_of(model: ModelConfig) -> PreTrainedConfig:
    return load_config(model.path, trust_remote_code=model.trust_remote_code)


def _dtype_of(model: ModelConfig) -> torch.dtype:
    return resolve_dtype(model.dtype, _config_of(model), _CPU)

"""Chooses how many GPUs share a target, if nobody says."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..config import ConfigError, EngineConfig, ModelConfig
from ..models.admission import resolve_dtype
from ..models.architectures import load_config
from ..models.formats import take_format
from ..models.gguf_file import GgufFile
from ..models.heads.config import is_head
from ..models.unread import layer_of
from ..models.weight_files import GGUF, OF_IMAGES, holds_gguf, name_in_text, stored_tensors
from .fit import Weights, fewest_gpus, most_for_weights, room_for_weights

_PLAIN = {"BF16", "F16", "F32"}  # numbers in files that are loaded in the model's dtype
_MOST_ADVISED = 64  # GPUs

log = logging.getLogger(__name__)


def choose_ranks(config: EngineConfig) -> EngineConfig:
    """The same, for GPUs, with its target on the fewest that have room for the pair and a KV cache.

    If none have, on the most that can share it, with a smaller cache; an optional draft that keeps
    the weights from fitting is left out. Logs a choice of several.
    Raises ConfigError saying what would fit.
    """
    try:
        weights = pair_weights(config)
    except Exception as error:  # whoever loads these files says more
        log.warning("the weights cannot be counted, so one GPU is taken: %s", error)
        return config
    target, device = config.target, torch.device(config.device)
    total_bytes = torch.cuda.get_device_properties(device.index or 0).total_memory
    utilization = config.gpu_memory_utilization
    room_bytes = room_for_weights(total_bytes, utilization)
    if fewest_gpus(weights, room_bytes, [1]) is not None:
        return config
    from .admission import Sharing, why_not_these_gpus  # imports the families of models: seconds

    num_gpus = torch.cuda.device_count()
    sharing = Sharing(target)
    why_not = {
        n: sharing.why_not(n) or why_not_these_gpus(n, device) for n in range(2, num_gpus + 1)
    }
    numbers = [1, *(n for n, reason in why_not.items() if reason is None)]
    most_bytes = most_for_weights(total_bytes, utilization, can_share=len(numbers) > 1)
    num = fewest_gpus(weights, room_bytes, numbers)
    num = num or fewest_gpus(weights, most_bytes, numbers[-1:])
    roles = "the target" if config.loaded_draft is None else "target and draft"
    text = (
        f"the weights of {roles} take {weights.in_all / 1e9:.1f} GB, of which "
        f"{weights.whole / 1e9:.1f} are on the first GPU however many share the target; visible "
        f"GPUs: {num_gpus}, of {total_bytes / 1e9:.0f} GB, with room for {room_bytes / 1e9:.1f}"
    )
    draft = config.loaded_draft
    if num is None and draft is not None and draft.is_optional:
        without = config.without_draft()
        if fewest_gpus(pair_weights(without), most_bytes, numbers) is not None:
            log.warning("%s, so there is no draft model: %s", text, draft.instead)
            return choose_ranks(without)
    if num is None:
        can_share = (n for n in range(2, _MOST_ADVISED + 1) if sharing.why_not(n) is None)
        enough = fewest_gpus(weights, room_bytes, can_share)
        advised = [f"{enough} GPUs of this size"] if enough else []
        advised += [*_changes_that_fit(config, most_bytes, numbers), "a checkpoint in fewer bits"]
        if len(numbers) == 1 and (reason := why_not.get(2)):
            text += f". 2 GPUs cannot share it: {reason}"
        raise ConfigError(f"{text}. Take {', '.join(advised)} or a smaller model")
    if num > 1:
        fewer = _changes_that_fit(config, room_bytes, [n for n in numbers if n < num])
        advice = f"; fewer are enough with {' or '.join(fewer)}" if fewer else ""
        log.info("target.tensor_parallel: %d GPUs share the target: %s%s", num, text, advice)
    return replace(config, target=replace(target, tensor_parallel=num))


def pair_weights(config: EngineConfig) -> Weights:
    """What the weights of a pair take on GPUs.

    Plain numbers are loaded in the model's dtype, or rounded to 8 bits; quantised ones stay as
    they are in the file, but those of GGUF files. Heads are counted as if they were not rounded:
    then they need a copy of the output layer.
    """
    target, draft, device = config.target, config.loaded_draft, torch.device(config.device)
    hf_config = load_config(target.path, trust_remote_code=target.trust_remote_code)
    dtype = resolve_dtype(target.dtype, hf_config, device)
    num_layers = hf_config.get_text_config().num_hidden_layers
    has_mtp = draft is not None and draft.is_mtp
    shared = whole = 0
    for name, num_bytes in _tensors(target, dtype):
        is_mtp = ".mtp" in f".{name}" or layer_of(name) >= num_layers
        if layer_of(name) >= 0 and not is_mtp:
            shared += num_bytes
        elif has_mtp or not is_mtp:
            whole += num_bytes
    if draft is not None and not has_mtp:
        if not is_head(draft):  # a head computes in its target's dtype
            own = load_config(draft.path, trust_remote_code=draft.trust_remote_code)
            dtype = resolve_dtype(draft.dtype, own, device)
        whole += sum(num_bytes for _, num_bytes in _tensors(draft, dtype))
    return Weights(shared + whole, whole)


def _tensors(model: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, int]]:
    """The name of each tensor of a model directory, and the bytes that it takes on a GPU."""
    folder = Path(model.path)
    if holds_gguf(folder):  # unpacked to the model's dtype
        for name, entry in GgufFile(folder / GGUF).entries.items():
            yield name, math.prod(entry.shape) * dtype.itemsize
        return
    if not any(folder.glob("*.safetensors")):  # a head of torch.save
        yield "", sum(file.stat().st_size for file in folder.glob("*.bin"))
        return
    for stored_name, stored in stored_tensors(folder).items():
        if stored_name.startswith(OF_IMAGES):
            continue
        name, num_bytes = name_in_text(stored_name), stored.end - stored.start
        if stored.dtype in _PLAIN:
            is_matrix = len(stored.shape) > 1 and layer_of(name) >= 0
            rounds = model.quantization is not None and is_matrix
            num_bytes = math.prod(stored.shape) * (1 if rounds else dtype.itemsize)
        yield name, num_bytes


def _changes_that_fit(config: EngineConfig, room_bytes: float, numbers: Sequence[int]) -> list[str]:
    """The settings with which the pair fits on one of these numbers of GPUs."""
    target = config.target
    changes = {"no draft (--no-draft)": replace(config, draft=None)}
    own = load_config(target.path, trust_remote_code=target.trust_remote_code)
    if take_format(own, Path(target.path)) is None:
        rounded = replace(config, target=replace(target, quantization="fp8"))
        changes['target.quantization = "fp8"'] = rounded
    return [
        text
        for text, changed in changes.items()
        if fewest_gpus(pair_weights(changed), room_bytes, numbers) is not None
    ]

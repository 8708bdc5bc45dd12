"""Which models ranks can share, and on which devices; refused before a process is started."""

import functools
import sys
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ..config import ConfigError, EngineConfig, ModelConfig
from ..models.architectures import load_config
from ..models.families import FAMILIES, why_unknown
from ..models.formats import take_format
from ..models.heads.config import is_head
from ..models.weight_files import holds_gguf
from .fit import are_equal
from .scales import ScaledInputs, scaled_inputs


def check_ranks(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError saying what keeps so many ranks from sharing target and draft, and what
    would work.
    """
    target, draft = config.target, config.draft
    if target.tensor_parallel < 1:
        raise ConfigError(f"target.tensor_parallel is {target.tensor_parallel}; it is at least 1")
    reason = None
    if target.tensor_parallel > 1:
        alone = "leave it out, or run a replica on each GPU"
        reason = (
            Sharing(target, alone=alone).why_not(target.tensor_parallel)
            or why_not_these_gpus(target.tensor_parallel, device)
            or _why_not_in_this_process()
        )
    if reason is not None:
        raise ConfigError(f"target.tensor_parallel is {target.tensor_parallel}, but {reason}")
    if draft is None or draft.tensor_parallel == 1:
        return
    reason = _why_not_with(target.tensor_parallel, draft)
    if reason is not None:
        raise ConfigError(f"draft.tensor_parallel is {draft.tensor_parallel}, but {reason}")


def _why_not_with(num_ranks: int, draft: ModelConfig) -> str | None:
    if draft.tensor_parallel != num_ranks:
        return (
            f"target.tensor_parallel is {num_ranks}, and a draft is whole on the first of its "
            "ranks, or shared by all: leave it out, or set both to one number"
        )
    if is_head(draft):
        return "only a draft model can be shared, and this is a head: leave it out"
    return Sharing(draft, "draft", alone="leave it out").why_not(num_ranks)


def why_not_these_gpus(size: int, device: torch.device) -> str | None:
    """What keeps the first so many GPUs, or processes on a CPU, from sharing any target."""
    if sys.platform != "linux":
        return "only Linux has what the processes meet over: leave it out"
    if device.type != "cuda":
        return None
    if device.index is not None:
        return (
            f"target.device names one GPU, {device}: set it to cuda, and choose GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    num_gpus = torch.cuda.device_count()
    if num_gpus < size:
        are = "GPU is" if num_gpus == 1 else "GPUs are"
        return f"{num_gpus} {are} visible: set it to {num_gpus} at most"
    gpus = [torch.cuda.get_device_properties(i) for i in range(size)]
    if len(names := sorted({gpu.name for gpu in gpus})) > 1:  # each would take its own kernels
        return (
            f"the GPUs are {' and '.join(names)}, but ranks need GPUs of one model: choose them "
            "with CUDA_VISIBLE_DEVICES"
        )
    sizes = [gpu.total_memory for gpu in gpus]
    if not are_equal(sizes):
        given = ", ".join(f"{each / 2**30:.0f}" for each in sizes)
        return (
            f"the GPUs have {given} GiB, and all get shares of the same size: choose equal ones "
            "with CUDA_VISIBLE_DEVICES"
        )
    return None


def _why_not_in_this_process() -> str | None:
    if dist.is_initialized():
        return (
            "torch.distributed is in use in this process, as by another engine whose target is "
            "shared: close that first, or start this one in a process of its own"
        )
    return None


class Sharing:
    """Which numbers of ranks can share a model. Its files are read once, and only if asked for."""

    def __init__(
        self, model: ModelConfig, role: Literal["target", "draft"] = "target", *, alone: str = ""
    ) -> None:
        """`alone`: what to do instead, if it cannot be shared at all."""
        self._model, self._role, self._alone = model, role, alone

    def why_not(self, num_ranks: int) -> str | None:
        """What keeps so many ranks from sharing it, and what would work; None: nothing does."""
        instead = self._alone and f": {self._alone}"
        if holds_gguf(Path(self._model.path)):
            return f"the {self._role} is a GGUF file, which is read whole{instead}"
        if not (Path(self._model.path) / "config.json").is_file():
            return None  # whoever reads it says so
        config, quantised = self._config
        if reason := why_unknown(config, quantised):
            return f"the {self._role} runs as transformers has it ({reason}){instead}"
        reason = self._why_cut(num_ranks)
        if reason is None:
            return None
        if self._role == "target":
            numbers = range(2, config.num_attention_heads + 1)
            works = [1, *(n for n in numbers if not self._why_cut(n))]
            instead = f": set it to {_one_of(works)}"
        return f"{reason}{instead}"

    def _why_cut(self, num_ranks: int) -> str | None:
        """What of it so many ranks would cut."""
        config, _ = self._config
        if cut := FAMILIES[config.model_type].cut_by(config, num_ranks):
            return f"it does not divide {', '.join(cut)}"
        reasons = (inputs.why_cut(num_ranks) for inputs in self._scaled_inputs)
        return next(filter(None, reasons), None)

    @functools.cached_property
    def _config(self) -> tuple[PreTrainedConfig, str | None]:
        """Of the plain model, and the format of its weights; None: they are plain."""
        model = self._model
        config = load_config(model.path, trust_remote_code=model.trust_remote_code)
        found = take_format(config, Path(model.path))
        return config, found and found[0]

    @functools.cached_property
    def _scaled_inputs(self) -> list[ScaledInputs]:
        config, quantised = self._config
        if quantised is None:
            return []
        return scaled_inputs(self._model.path, config, FAMILIES[config.model_type])


def _one_of(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last

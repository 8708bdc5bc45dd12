"""Which models ranks can share, and on which devices; refused before a process is started."""

import sys
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from ..config import ConfigError, EngineConfig, ModelConfig
from ..models.architectures import load_config
from ..models.families import FAMILIES, why_unknown
from ..models.formats import take_format
from ..models.gguf_file import holds_gguf
from ..models.heads.config import is_head
from .fit import are_equal
from .scales import why_scales_cut


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
        reason = why_not_on(target.tensor_parallel, target, device, alone)
        reason = reason or _why_not_in_this_process()
    if reason is not None:
        raise ConfigError(f"target.tensor_parallel is {target.tensor_parallel}, but {reason}")
    if draft is None or draft.tensor_parallel == 1:
        return
    reason = _why_not_with(target.tensor_parallel, draft)
    if reason is not None:
        raise ConfigError(f"draft.tensor_parallel is {draft.tensor_parallel}, but {reason}")


def why_not_on(
    num_ranks: int, target: ModelConfig, device: torch.device, alone: str = ""
) -> str | None:
    """What keeps the first so many GPUs, or processes on a CPU, from sharing a target; None:
    nothing does. `alone`: what to do instead, if it cannot be shared at all.
    """
    reason = why_not_shared(num_ranks, target, alone=alone)
    return reason or why_not_these_gpus(num_ranks, device)


def _why_not_with(num_ranks: int, draft: ModelConfig) -> str | None:
    if draft.tensor_parallel != num_ranks:
        return (
            f"target.tensor_parallel is {num_ranks}, and a draft is whole on the first of its "
            "ranks, or shared by all: leave it out, or set both to one number"
        )
    if is_head(draft):
        return "only a draft model can be shared, and this is a head: leave it out"
    return why_not_shared(num_ranks, draft, "draft", alone="leave it out")


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
        return f"{num_gpus} GPUs are visible: set it to {num_gpus} at most"
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


def why_not_shared(
    num_ranks: int,
    model: ModelConfig,
    role: Literal["target", "draft"] = "target",
    *,
    alone: str = "",
) -> str | None:
    """What keeps so many ranks from sharing a model; None: nothing does. `alone` as above."""
    instead = alone and f": {alone}"
    if holds_gguf(Path(model.path)):
        return f"the {role} is a GGUF file, which is read whole{instead}"
    if not (Path(model.path) / "config.json").is_file():
        return None  # whoever reads it says so
    config = load_config(model.path, trust_remote_code=model.trust_remote_code)
    # The configuration is then that of the plain model.
    quantised = take_format(config, Path(model.path))
    if reason := why_unknown(config):
        return f"the {role} runs as transformers has it ({reason}){instead}"
    family = FAMILIES[config.model_type]
    cut = family.cut_by(config, num_ranks)
    if not cut:
        return None if quantised is None else why_scales_cut(model.path, num_ranks, config, family)
    if role == "target":
        numbers = range(1, config.num_attention_heads + 1)
        choices = [str(n) for n in numbers if not family.cut_by(config, n)]
        instead = f": set it to {' or '.join(choices)}"
    return f"it does not divide {', '.join(cut)}{instead}"

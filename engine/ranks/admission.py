"""Which targets ranks can share, and on which devices; refused before a process is started."""

import sys
from pathlib import Path

import torch

from ..config import ConfigError, EngineConfig, ModelConfig
from ..models.architectures import load_config
from ..models.families import FAMILIES, why_unknown
from ..models.formats import take_format
from ..models.gguf_file import transformers_arguments

_LEAST_EQUAL = 0.95  # memory of the smallest GPU by that of the largest


def check_ranks(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError saying what keeps so many ranks from sharing the target, and what would
    work.
    """
    target, draft = config.target, config.draft
    if draft is not None and draft.tensor_parallel != 1:
        raise ConfigError(
            f"draft.tensor_parallel is {draft.tensor_parallel}, but a draft is whole on the first "
            "rank: leave it out"
        )
    if target.tensor_parallel < 1:
        raise ConfigError(f"target.tensor_parallel is {target.tensor_parallel}; it is at least 1")
    if target.tensor_parallel == 1:
        return
    reason = _why_not_shared(target) or _why_not_these_gpus(target.tensor_parallel, device)
    if reason is not None:
        raise ConfigError(f"target.tensor_parallel is {target.tensor_parallel}, but {reason}")


def _why_not_these_gpus(size: int, device: torch.device) -> str | None:
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
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(size)]
    if min(sizes) < _LEAST_EQUAL * max(sizes):
        given = ", ".join(f"{each / 2**30:.0f}" for each in sizes)
        return (
            f"the GPUs have {given} GiB, and all get shares of the same size: choose equal ones "
            "with CUDA_VISIBLE_DEVICES"
        )
    return None


def _why_not_shared(target: ModelConfig) -> str | None:
    alone = "leave it out, or run a replica on each GPU"
    if transformers_arguments(Path(target.path)):
        return f"the target is a GGUF file, which is read whole: {alone}"
    if not (Path(target.path) / "config.json").is_file():
        return None  # whoever reads it says so
    config = load_config(target.path, trust_remote_code=target.trust_remote_code)
    take_format(config, Path(target.path))  # the configuration is then that of the plain model
    if reason := why_unknown(config):
        return f"the target runs as transformers has it ({reason}): {alone}"
    family = FAMILIES[config.model_type]
    if not family.per_rank:
        return f"layers of {config.model_type} are not shared yet: {alone}"
    cut = family.cut_by(config, target.tensor_parallel)
    if not cut:
        return None
    numbers = range(1, config.num_attention_heads + 1)
    choices = [str(n) for n in numbers if not family.cut_by(config, n)]
    return f"it does not divide {', '.join(cut)}: set it to {' or '.join(choices)}"

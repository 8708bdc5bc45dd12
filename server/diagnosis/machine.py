"""Findings about this machine: Python, torch, GPUs, memory, disk, models."""

import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from transformers import PreTrainedConfig

from outrider.engine.config import CacheConfig, ConfigError, SpeculationConfig
from outrider.engine.host_memory import available_bytes, check_host_memory
from outrider.engine.models.admission import resolve_dtype
from outrider.engine.ranks.fit import fewest_gpus, most_for_weights, room_for_weights
from outrider.kernels.cpu import layers

from ..models import builtin, store
from ..models.known_drafts import SUGGESTED, Suggestion
from .weights import PairWeights

LEAST_CAPABILITY = (8, 0)  # of a GPU: from here on tensor cores compute in bfloat16
LEAST_DISK_GB = 2.0  # for the default pair and its download
# Share of a CPU's free memory that the weights of a pair may take: the rest is for the KV cache and
# for steps.
WEIGHTS_SHARE_CPU = 0.5
# Weights are read once for each token: more than this is too slow from a CPU's memory.
MAX_CPU_WEIGHTS_GB = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: `bad` keeps the server from running, `note` may matter."""

    state: Literal["ok", "note", "bad"]
    text: str
    remedy: str | None = None


def system() -> Finding:
    text = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "darwin":
        return Finding("note", text, "macOS runs the CPU path only: no Metal, no CUDA.")
    return Finding("ok", text)


def python() -> Finding:
    return Finding("ok", f"{platform.python_version()} at {sys.executable}")


def torch_build() -> Finding:
    """torch, and whether its CUDA fits the driver."""
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    text = f"{torch.__version__}, built for {built_for}"
    driver = nvidia_driver()
    if driver is None:
        return Finding("ok", text)
    text += f"; NVIDIA driver {driver}"
    if torch.version.cuda is None:
        return Finding(
            "note",
            text,
            "There is a GPU, and this torch cannot use it: pip install --force-reinstall "
            "torch, from an index that has CUDA builds.",
        )
    if not torch.cuda.is_available():
        return Finding(
            "note",
            text,
            f"torch cannot use the GPU: the driver is too old for {built_for}. Update it, "
            "or install a torch for an older CUDA (https://pytorch.org/get-started).",
        )
    return Finding("ok", text)


def nvidia_driver() -> str | None:
    """The driver's version, according to nvidia-smi; None if there is no NVIDIA GPU."""
    if (command := shutil.which("nvidia-smi")) is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().partition("\n")[0] or None


def gpu(device: str, num_ranks: int = 1) -> Finding:
    """The GPUs, and whether there are those that the target's `device` and number of ranks need."""
    if not torch.cuda.is_available():
        if device.startswith("cuda"):
            text = f"none, and target.device is {device!r}"
            remedy = "With --set target.device=auto the CPU is used if there is no GPU."
            return Finding("bad", text, remedy)
        return Finding("note", "none: models run on the CPU")
    parts, too_old, num_gpus = [], False, torch.cuda.device_count()
    for i in range(num_gpus):
        properties = torch.cuda.get_device_properties(i)
        free_bytes, total_bytes = torch.cuda.mem_get_info(i)
        too_old |= (properties.major, properties.minor) < LEAST_CAPABILITY
        parts.append(
            f"cuda:{i} {properties.name}, {free_bytes / 1e9:.0f} of {total_bytes / 1e9:.0f} GB free"
        )
    if device.startswith("cuda:") and int(device.removeprefix("cuda:")) >= num_gpus:
        text = f"target.device is {device!r}, and there are only: {'; '.join(parts)}"
        remedy = "Name one of these; --set target.device=auto takes the first."
        return Finding("bad", text, remedy)
    if device != "cpu" and num_ranks > num_gpus:
        text = f"target.tensor_parallel is {num_ranks}, and there are only: {'; '.join(parts)}"
        return Finding("bad", text, f"Set it to {num_gpus} at most.")
    if too_old:
        remedy = "GPUs before Ampere (compute capability 8.0) have not been tried."
        return Finding("note", "; ".join(parts), remedy)
    return Finding("ok", "; ".join(parts))


def compiler() -> Finding:
    """Whether Triton can build kernel launchers: it needs a C compiler and Python's headers.

    Without a GPU: whether the CPU's layers were compiled when Outrider was installed.
    """
    if not torch.cuda.is_available():
        if layers.compiled() is not None:
            return Finding("ok", "not needed: the CPU's layers are compiled")
        return Finding(
            "note",
            "the CPU's layers were not compiled, or from other C++ than is here: GGUF files and "
            "the default pair run slower",
            "Install a C++ compiler and Python's headers (Debian, Ubuntu: apt install g++ "
            "python3-dev), then Outrider again.",
        )
    candidates = [os.environ.get("CC"), "gcc", "clang"]
    found = next((path for each in candidates if each and (path := shutil.which(each))), None)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if found and headers.exists():
        return Finding("ok", f"{found}, and Python's headers")
    missing = [
        *([] if found else ["a C compiler (Debian, Ubuntu: apt install gcc)"]),
        *([] if headers.exists() else [f"{headers} (Debian, Ubuntu: apt install python3-dev)"]),
    ]
    return Finding("bad", "Triton cannot build its kernels", f"Install {' and '.join(missing)}.")


def processor() -> Finding:
    text = f"{psutil.cpu_count(logical=False) or '?'} cores, {os.cpu_count()} threads"
    dtype = resolve_dtype("auto", PreTrainedConfig(), torch.device("cpu"))
    text += f"; models run in {str(dtype).removeprefix('torch.')} on it"
    return Finding("ok", text)


def memory(cache: CacheConfig) -> Finding:
    """What is available, and whether it is enough for the cache's second tier."""
    try:
        check_host_memory(cache, SpeculationConfig())
    except ConfigError as error:
        return Finding("bad", str(error))
    left = available_bytes()
    text = f"{left / 1e9:.0f} of {psutil.virtual_memory().total / 1e9:.0f} GB available"
    if left >= 1.5e9:
        return Finding("ok", text)
    return Finding("note", text, "The default pair takes about 1 GB. End something else.")


def disk() -> Finding:
    """The disk that models are stored on."""
    home = store.home()
    folder = next(path for path in (home, *home.parents) if path.exists())
    free_gb = shutil.disk_usage(folder).free / 1e9
    text = f"{free_gb:.0f} GB free for models in {home}"
    # What is there already needs no room.
    state: Literal["note", "bad"] = "bad" if _missing() else "note"
    if not os.access(folder, os.W_OK):
        return Finding(
            state,
            f"{text}, which this user may not write to",
            "Set OUTRIDER_HOME to a folder that is yours.",
        )
    if free_gb < LEAST_DISK_GB:
        remedy = "Make room, or set OUTRIDER_HOME to a folder on another disk."
        return Finding(state, text, remedy)
    return Finding("ok", text)


def models() -> Finding:
    """Whether the default pair is there already."""
    if not (missing := _missing()):
        return Finding("ok", "the default pair is there")
    return Finding(
        "note",
        f"not fetched yet: {', '.join(missing)}",
        "`outrider models fetch` gets them now (0.1 GB); `outrider serve` does it, too.",
    )


def _missing() -> list[str]:
    return [name for name, each in builtin.BUILTINS.items() if not store.find(name, each.source)]


def pair(
    *,
    has_hub: bool,
    configured: str | None = None,
    counted: PairWeights | str = "",
    num_ranks: int | None = None,
    shares_draft: bool = False,
    utilization: float = 0.9,
) -> Finding:
    """Whether the configured target fits this machine with its draft; if none is configured, the
    largest suggested pair that does and can be obtained. `num_ranks` share the target (None: as few
    as hold it), and perhaps the draft, which is counted as if it were whole. `counted` is what the
    configured pair takes, or why nobody knows; a suggested one's draft is known, the hub's is not.
    `utilization` is `engine.gpu_memory_utilization`.
    """
    num_gpus, numbers = torch.cuda.device_count() if torch.cuda.is_available() else 0, [1]
    if torch.cuda.is_available():
        total_bytes, where = float(torch.cuda.mem_get_info()[1]), "the GPU"
        if num_gpus > 1:
            from outrider.engine.ranks.admission import why_not_these_gpus  # takes seconds

            device = torch.device("cuda")
            numbers += [n for n in range(2, num_gpus + 1) if why_not_these_gpus(n, device) is None]
            first = range(min(num_ranks or numbers[-1], num_gpus))
            total_bytes = min(torch.cuda.mem_get_info(i)[1] for i in first)
            where = "each GPU" if len(first) > 1 else "the first GPU"
        room_bytes = room_for_weights(total_bytes, utilization)
    else:
        total_bytes, where = math.inf, "the CPU"  # where the server leaves no draft out
        room_bytes = available_bytes() * WEIGHTS_SHARE_CPU
        room_bytes = min(room_bytes, MAX_CPU_WEIGHTS_GB * 1e9)
    at_hand = [each for each in SUGGESTED if has_hub or each.model in builtin.BUILTINS]
    if configured is not None:
        at_hand = [each for each in SUGGESTED if each.model == configured]
    dtype = torch.bfloat16
    if not torch.cuda.is_available():
        dtype = resolve_dtype("auto", PreTrainedConfig(), torch.device("cpu"))
        at_hand = [_in_dtype(each, dtype) for each in at_hand]
    in_dtype = f" in {str(dtype).removeprefix('torch.')}"
    known = [(each.model, _counted(each)) for each in at_hand]
    if configured and isinstance(counted, PairWeights) and not (known and counted.is_least):
        known, in_dtype = [(configured, counted)], ""
    if not known:
        return Finding("note", f"how much memory {configured} takes is not known: {counted}")
    numbers = numbers if num_ranks is None else [num_ranks]
    if isinstance(counted, PairWeights) and counted.config is not None and numbers != [1]:
        from outrider.engine.ranks.admission import Sharing, check_ranks

        try:
            check_ranks(counted.config, torch.device(counted.config.device))
        except ConfigError as error:
            return Finding("bad", str(error))
        if num_ranks is None:
            sharing = Sharing(counted.config.target)
            numbers = [n for n in numbers if n == 1 or sharing.why_not(n) is None]
    elif num_ranks is None:  # its heads are not known; nearly every model's divide so
        numbers = [n for n in numbers if n.bit_count() == 1]
    if isinstance(counted, PairWeights) and counted.without_draft is not None:
        most_bytes = most_for_weights(total_bytes, utilization, can_share=len(numbers) > 1)
        if fewest_gpus(counted.weights, most_bytes, numbers[-1:]) is None:
            known = [(model, counted.without_draft) for model, _ in known]
    fits = ((each, fewest_gpus(each[1].weights, room_bytes, numbers)) for each in known)
    (model, found), num = next((fit for fit in fits if fit[1]), (known[-1], None))
    text = f"{found.text} {found.weights.in_all / 1e9:.1f} GB of weights{in_dtype}"
    if (shared_by := num or numbers[0]) > 1:
        about = "at least " if found.is_least else "at most " if shares_draft else ""
        first_gb = found.weights.of_first(shared_by) / 1e9
        text += f", {about}{first_gb:.1f} GB on the first of {shared_by} ranks"
    text += f"; {where} has room for {room_bytes / 1e9:.1f}"
    if num is not None:
        remedy = f"outrider serve {model}" if configured is None else None
        if remedy is not None and num_ranks is not None and num_ranks > 1:
            remedy += f" --tensor-parallel {num_ranks}"
        return Finding("ok", text, remedy)
    # Fewer bits, if the config asks for them, may fit.
    state: Literal["note", "bad"] = "bad" if configured is None else "note"
    return Finding(state, text, "Free some memory.")


def _counted(each: Suggestion) -> PairWeights:
    return PairWeights(f"{each.model} and its draft take", each.weights)


def _in_dtype(each: Suggestion, dtype: torch.dtype) -> Suggestion:
    """With the memory that it takes in this dtype; what is built in is in 4 to 8 bits on a CPU."""
    if each.model in builtin.BUILTINS:
        return each
    factor = dtype.itemsize / torch.bfloat16.itemsize
    return each._replace(size_gb=factor * each.size_gb, whole_gb=factor * each.whole_gb)

"""The formats of quantised checkpoints, one file for each family.

Whether a layer is quantised follows from its tensors: their names, dtypes and shapes. The
configuration only says how to read them. So layers that were left out, or differ, need no list. To
add a format, write a function from its configuration to a `Read` in a file here, and enter it in
FORMATS.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..admission import UnsupportedModelError
from ..checkpoint import Read
from . import awq, compressed_tensors, fp8, gptq, modelopt, mxfp4

FORMATS: dict[str, Callable[[dict[str, Any]], Read]] = {
    "awq": awq.reader,
    "compressed-tensors": compressed_tensors.reader,
    "fp8": fp8.reader,
    "gptq": gptq.reader,
    "modelopt": modelopt.reader,
    "mxfp4": mxfp4.reader,
}
_KEYS = ("quantization_config", "compression_config")
_FP8_CACHE = (8, "float", False)  # num_bits, type and dynamic of a kv_cache_scheme
_MODELOPT = "hf_quant_config.json"  # has the format if the configuration has none


def take_format(hf_config: PreTrainedConfig, folder: Path) -> tuple[str, Read] | None:
    """The format of the layers in a model directory and its reader; None if they are plain.

    Removes the format from the configuration, which is then that of the plain model. Raises
    UnsupportedModelError naming the format, or its option, that is not served.
    """
    for config in (hf_config, hf_config.get_text_config()):
        for key in _KEYS:
            if hasattr(config, key):
                delattr(config, key)
    found = _settings_in(folder)
    if found is None:
        return None
    key, settings = found
    name = str(settings.get("quant_method") or key)
    if name not in FORMATS:
        raise refused_format(f"{name} is none of {', '.join(FORMATS)}")
    try:
        return name, FORMATS[name](settings)
    except UnsupportedModelError as reason:
        raise refused_format(f"{name}: {reason}") from None


def rounds_cache(folder: Path) -> bool:
    """Whether the checkpoint in a model directory says that keys and values are kept in FP8."""
    _, settings = _settings_in(folder) or ("", {})
    scheme = settings.get("kv_cache_scheme") or {}
    kept = scheme.get("num_bits"), scheme.get("type"), scheme.get("dynamic", False)
    return kept == _FP8_CACHE or settings.get("kv_cache_quant_algo") == "FP8"


def _settings_in(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """A checkpoint's settings of its format, and under which name it has them."""
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text("utf-8"))
        for of in (config, config.get("text_config") or {}):
            for key in _KEYS:
                if of.get(key):
                    return key, of[key]
    if (folder / _MODELOPT).is_file():
        return "modelopt", _settings_of(folder / _MODELOPT)
    return None


def _settings_of(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text("utf-8"))["quantization"]
        return {"quant_algo": settings["quant_algo"], **settings}
    except (ValueError, KeyError, TypeError) as error:
        raise refused_format(f"{path.name} is damaged: {error!r}") from error


def refused_format(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"its weights are quantised in a way that is not served ({reason}); take the checkpoint "
        f"that it was quantised from, a GGUF file of it, or one in {', '.join(FORMATS)}"
    )

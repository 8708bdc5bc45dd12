"""Models as transformers has them, with every parameter read from their files."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.kernels.reached import check_reached

from .admission import UnsupportedModelError
from .model_classes import AutoModelForCausalLM
from .opened_files import open_files
from .unread import warn_of_unread
from .weight_files import GGUF

check_reached(
    "transformers",
    PreTrainedModel,
    *("_is_stateful", "_keys_to_ignore_on_load_unexpected", "is_backend_compatible"),
)
check_reached("transformers", AutoModelForCausalLM, "_model_mapping")


def load_pretrained(
    path: Path,
    config: PreTrainedConfig | None,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """The model of a directory, or of a GGUF file whose `config` may be None: the file has one.

    `options` are those of transformers' `from_pretrained`, which needs accelerate for GGUF files,
    and to load onto a GPU. Raises UnsupportedModelError if files are missing or damaged, or do not
    have each of the model's tensors in its shape.
    """
    if device.type != "cpu":
        options["device_map"] = {"": device}
    gguf = path if path.is_file() else path / GGUF
    model_class: Any = AutoModelForCausalLM
    source: dict[str, Any]
    if gguf.is_file():
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    else:
        # Not the folder: transformers reads model.safetensors though there is an index, and of two
        # tensors of one name the last. Without a folder it must be given the class.
        if type(config) not in AutoModelForCausalLM._model_mapping and not trust_remote_code:
            raise UnsupportedModelError(
                "transformers generates text alone with no model of this type; take a checkpoint "
                "of its text, if there is one"
            )
        source = {"pretrained_model_name_or_path": None, "state_dict": _tensors(path)}
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), trust_remote_code=trust_remote_code
            )
        model_class, config = type(empty), empty.config  # for a multimodal one, that of its text
    loaded = model_class.from_pretrained(
        config=config,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # its own error does not name them
        **source,
        **options,
    )
    model: PreTrainedModel = loaded[0]
    _check_loaded(loaded[1])
    ignored = model._keys_to_ignore_on_load_unexpected
    text_config = model.config.get_text_config()
    warn_of_unread(str(path), loaded[1]["unexpected_keys"], text_config, ignored)
    return model


def _tensors(folder: Path) -> dict[str, Any]:
    """The tensors of a directory, by name; those of safetensors files are read when they are used.

    Raises UnsupportedModelError.
    """
    try:
        files = open_files(folder)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    return {
        name: file[name] if isinstance(file, dict) else file.get_slice(name)
        for name, file in files.items()
    }


def _check_loaded(account: dict[str, Any]) -> None:
    """Refuse a model whose tensors transformers did not read as they are meant.

    `account` is what it reports of them. Raises UnsupportedModelError.
    """
    if missing := sorted(account["missing_keys"]):
        raise UnsupportedModelError(
            f"its files lack {', '.join(missing[:3])}, which transformers would draw at random; "
            "get the model again"
        )
    if wrong := sorted(account["mismatched_keys"]):
        name, found, wanted = wrong[0]
        raise UnsupportedModelError(
            f"{name} is {' x '.join(map(str, found))}; by its config it must be "
            f"{' x '.join(map(str, wanted))}"
        )
    if scales := sorted(name for name in account["unexpected_keys"] if ".weight_scale" in name):
        raise UnsupportedModelError(
            f"its weights are quantised ({scales[0]}), but its config.json does not say how "
            "(quantization_config); take the checkpoint that it was quantised from"
        )

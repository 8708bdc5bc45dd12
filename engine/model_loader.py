"""Load a Hugging Face model and admit it: refuse at load what would be silently wrong."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.utils import logging as transformers_logging

from outrider.engine.attention import (
    ATTENTION_NAME,
    DryRun,
    LayerSpec,
    UnsupportedModelError,
    attention_context,
)
from outrider.engine.config import ModelConfig
from outrider.engine.cpu_linear import pack_linears
from outrider.engine.fused_layers import fuse_layers

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LAYER_TYPES = {"full_attention", "sliding_attention"}

# These dispatch to our attention, yet keep part of their meaning in the mask or call it otherwise.
REFUSED_MODEL_TYPES = {
    "llama4": "its chunked attention lives in the mask",
    "llama4_text": "its chunked attention lives in the mask",
    "phimoe": "its sliding window lives in the mask",
    "qwen2_moe": "its sliding window lives in the mask",
    "doge": "it builds a dynamic mask of its own",
    "diffllama": "it calls attention twice a layer",
    "stablelm": "it drops attention arguments",
}


def load_model(
    config: ModelConfig,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    *,
    rounds_on_cpu: bool = False,
) -> tuple[PreTrainedModel, list[LayerSpec]]:
    """Load a model directory onto a device, in evaluation mode, ready for the paged KV cache.

    With `rounds_on_cpu` its linear layers get 8-bit weights where a CPU gains by it. `progress` is
    told how many of how many parameters are there. Returns the model and its attention layers in
    order. Raises UnsupportedModelError saying why.
    """
    progress = progress or (lambda done, total: None)
    progress(0, 0)
    if not (Path(config.path) / "config.json").is_file():
        raise UnsupportedModelError(f"{config.path} is no model directory: it has no config.json")
    hf_config = AutoConfig.from_pretrained(
        config.path, trust_remote_code=config.trust_remote_code, local_files_only=True
    )
    try:
        check_config(hf_config)
        with _weights_counted(progress), _weights_apart():
            model = AutoModelForCausalLM.from_pretrained(
                config.path,
                config=hf_config,
                dtype=resolve_dtype(config.dtype, hf_config, device),
                device_map={"": device},
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
            )
        model.eval().requires_grad_(False)
        layers = dry_run(model)
        fuse_layers(model, layers, rounds_on_cpu=rounds_on_cpu)
        if device.type == "cpu":
            pack_linears(model, rounds=rounds_on_cpu)
        return model, layers
    except UnsupportedModelError as reason:
        raise UnsupportedModelError(
            f"{config.path} ({hf_config.model_type}) cannot be served: {reason}"
        ) from None


@contextlib.contextmanager
def _weights_counted(progress: Callable[[int, int], None]) -> Iterator[None]:
    """Have transformers report the weights that it loads in place of drawing a bar of its own."""

    def hook(make_bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _counted(args[0], progress) if args else make_bar(*args, **kwargs)

    transformers_logging.disable_progress_bar()
    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


@contextlib.contextmanager
def _weights_apart() -> Iterator[None]:
    """Give each weight on a GPU memory of its own.

    transformers would reserve one block for all: where weights are merged then, the old ones leave
    holes in it, half of the model's size in all, that nothing else fits and nobody can give back.
    """
    name = "caching_allocator_warmup"
    reserve = getattr(modeling_utils, name, None)
    setattr(modeling_utils, name, lambda *arguments: None)
    try:
        yield
    finally:
        setattr(modeling_utils, name, reserve)


def _counted(items: Collection[Any], progress: Callable[[int, int], None]) -> Iterator[Any]:
    for done, item in enumerate(items):
        progress(done, len(items))
        yield item


def resolve_dtype(name: str, hf_config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype to run in; "auto" is the checkpoint's on CUDA and the faster one on a CPU."""
    if name != "auto":
        if name not in DTYPES:
            raise UnsupportedModelError(f"dtype is {name!r}; it may be auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
    checkpoint_dtype = hf_config.get_text_config().dtype
    return checkpoint_dtype if isinstance(checkpoint_dtype, torch.dtype) else torch.bfloat16


def _cpu_has_bfloat16() -> bool:
    # Without these instructions bfloat16 is emulated, several times slower than float32.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(line.split())
    return False


def check_config(hf_config: PreTrainedConfig) -> None:
    """Refuse by configuration; raises UnsupportedModelError."""
    if reason := REFUSED_MODEL_TYPES.get(hf_config.model_type):
        raise UnsupportedModelError(reason)
    text_config = hf_config.get_text_config()
    unknown = set(getattr(text_config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise UnsupportedModelError(f"it has layers of type {', '.join(sorted(unknown))}")
    rope_types = _rope_types(text_config)
    if "dynamic" in rope_types:
        raise UnsupportedModelError("its dynamic RoPE depends on the whole batch")


def max_positions(hf_config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens, that the model computes correctly in any company."""
    text_config = hf_config.get_text_config()
    longest = int(text_config.max_position_embeddings)
    if "longrope" in _rope_types(text_config):
        # Beyond this, one long sequence would change the factors of its whole batch.
        rope = text_config.rope_parameters
        original = getattr(text_config, "original_max_position_embeddings", None) or rope.get(
            "original_max_position_embeddings"
        )
        longest = min(longest, int(original or longest))
    return longest


def _rope_types(text_config: PreTrainedConfig) -> set[str]:
    rope = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    return {str(r.get("rope_type", "default")) for r in by_layer_type or [rope]}


@torch.inference_mode()
def dry_run(model: PreTrainedModel) -> list[LayerSpec]:
    """One tiny forward: every layer must call our attention exactly once, as we understand it."""
    if not model.is_backend_compatible():
        raise UnsupportedModelError("it does not dispatch its attention to a backend")
    if model._is_stateful:
        raise UnsupportedModelError("it keeps recurrent state, which cannot be rolled back")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError("its forward takes no logits_to_keep")
    record = DryRun()
    with attention_context(record):
        run_model(
            model,
            input_ids=torch.zeros(4, dtype=torch.int64, device=model.device),
            positions=torch.arange(4, device=model.device),
            logits_rows=torch.tensor([3], device=model.device),
        )
    num_layers = model.config.get_text_config().num_hidden_layers
    num_called = len({id(layer.module) for layer in record.layers})
    if num_called != num_layers or len(record.layers) != num_layers:
        raise UnsupportedModelError(
            f"of its {num_layers} layers, {num_called} called our attention, "
            f"{len(record.layers)} times in all"
        )
    return record.layers


def run_model(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor, logits_rows: Tensor
) -> Tensor:
    """One flattened forward; input_ids, positions: [T], logits_rows: [N] -> logits [N, V]."""
    output = model(
        input_ids=input_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logits_rows,
    )
    logits: Tensor = output.logits[0]
    return logits

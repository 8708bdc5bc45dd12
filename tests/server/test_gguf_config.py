"""What transformers does not read of a GGUF file's metadata becomes part of its config, or is a
reason to refuse the file: it would be another model.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter
from tiny_gguf import write_out
from tiny_models import save_tiny_model
from tiny_pairs import NUM_TOKENS, add_tokenizer, write_tiny_gguf
from transformers import AutoModelForCausalLM

from outrider.engine.api import ignore_progress
from outrider.engine.models.gguf_file import GgufFile
from outrider.engine.models.weight_files import GGUF
from outrider.server.models.convert import _unpack, gguf_to_directory
from outrider.server.models.gguf_config import config_of
from outrider.server.models.store import ModelError

THETA = {"rope_type": "default", "rope_theta": 5e5}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GEMMA = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True}
EPS = "attention.layer_norm_epsilon"
# Architecture in transformers, what is special about the model, and the metadata that say so.
MODELS: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    (
        "starcoder2",
        {"rope_parameters": THETA, "norm_epsilon": 1e-2, "sliding_window": None},
        {"rope.freq_base": 5e5, EPS: 1e-2},
    ),
    ("nemotron", {"norm_eps": 1e-2, "head_dim": 8}, {"rope.dimension_count": 4, EPS: 1e-2}),
    ("phi3", {"rope_parameters": HALF, "sliding_window": None}, {"rope.dimension_count": 4}),
    ("phi3", {"sliding_window": 5}, {"attention.sliding_window": 5}),
    ("qwen2", {"head_dim": 16}, {"attention.key_length": 16}),
    (
        "gemma2",
        {
            **GEMMA,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
        {
            "attention.key_length": 16,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    # Of 27B, by its number of layers: scores are scaled by 32 / 4, not by the width of a head.
    (
        "gemma2",
        {
            **GEMMA,
            "num_hidden_layers": 46,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 50.0,
        },
        {"attention.key_length": 16, "attention.sliding_window": 8},
    ),
]


def write_gguf(path: Path, architecture: str, model: Any, metadata: dict[str, float]) -> Path:
    """The model as llama.cpp's converter writes it."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(
            f"{architecture}.{key}", value
        )
    add_tokenizer(writer, "smollm")
    names = gguf.get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        adds_one = architecture in ("gemma2", "nemotron") and name.endswith("norm.weight")
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None
        writer.add_tensor(found, (tensor + adds_one).float().numpy())
    write_out(writer)
    return path


@pytest.mark.parametrize(("architecture", "special", "metadata"), MODELS)
def test_a_converted_model_computes_what_the_original_does(
    architecture: str, special: dict[str, Any], metadata: dict[str, float], tmp_path: Path
) -> None:
    sizes = {"vocab_size": NUM_TOKENS, "num_key_value_heads": 2, "pad_token_id": None}
    plain = save_tiny_model(tmp_path / "plain", architecture, **sizes | special)
    model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager")
    folder = tmp_path / "out"
    folder.mkdir()
    held = write_gguf(folder / GGUF, architecture, model, metadata)
    # Not the tokenizer: transformers 5.17 does not read it for all of these architectures.
    _unpack(held, GgufFile(held), "float32", None)
    held.unlink()
    converted = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.arange(40)[None] * 7 % NUM_TOKENS
    with torch.inference_mode():
        expected, got = (each(ids).logits for each in (model, converted))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.logit_scale": 0.5}, "llama.logit_scale 0.5"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv 8"),
        ({"llama.final_logit_softcapping": 5.0}, "llama.final_logit_softcapping 5"),
        ({"llama.attention.key_length": 16.0}, "llama.rope.dimension_count 8, but heads of 16"),
    ],
)
def test_what_no_config_can_state_is_refused_by_name(
    metadata: dict[str, str | float], named: str, tmp_path: Path
) -> None:
    tensors = {"blk.0.attn_q.weight": np.ones((64, 32))}
    source = write_tiny_gguf(
        tmp_path / "m.gguf", metadata=metadata, without=tensors, tensors=tensors
    )
    with pytest.raises(ModelError, match=f"it has {re.escape(named)}"):
        gguf_to_directory(source, tmp_path, ignore_progress)


def test_a_gemma_4_of_other_sizes_than_transformers_takes_for_granted_is_refused(
    tmp_path: Path,
) -> None:
    metadata: dict[str, str | float] = {"gemma4.attention.shared_kv_layers": 20.0}
    held = write_tiny_gguf(tmp_path / GGUF, architecture="gemma4", metadata=metadata)
    with pytest.raises(ValueError, match=r"shared_kv_layers 20.0, which transformers takes to be"):
        config_of(held, GgufFile(held), None)

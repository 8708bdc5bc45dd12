"""Tiny models with a tokenizer: whole directories, and GGUF files."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from mtp import save_tiny_mtp_model
from tiny_models import save_tiny_model
from tokenizers_for_tests import byte_level_wrapper

_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _FFN = 2, 32, 4, 2, 64


def save_tiny_model_with_tokenizer(path: Path, *, has_mtp: bool = False, **overrides: Any) -> Path:
    """A directory that `resolve` accepts: weights, config and tokenizer."""
    tokenizer = byte_level_wrapper()
    vocab_size = overrides.pop("vocab_size", len(tokenizer))
    save = save_tiny_mtp_model if has_mtp else save_tiny_model
    save(path, vocab_size=vocab_size, **overrides)
    tokenizer.save_pretrained(path)
    return path


def write_tiny_gguf(path: Path, pre: str = "smollm") -> Path:
    """A random two-layer llama in float32, with a byte-level tokenizer whose digits can merge."""
    tokens, types, merges = _vocabulary()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), _HIDDEN)
    add("output_norm.weight", _HIDDEN)
    head = _HIDDEN // _HEADS
    for layer in range(_LAYERS):
        add(f"blk.{layer}.attn_norm.weight", _HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", _HIDDEN)
        add(f"blk.{layer}.attn_q.weight", _HIDDEN, _HIDDEN)
        add(f"blk.{layer}.attn_k.weight", head * _KV_HEADS, _HIDDEN)
        add(f"blk.{layer}.attn_v.weight", head * _KV_HEADS, _HIDDEN)
        add(f"blk.{layer}.attn_output.weight", _HIDDEN, _HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", _FFN, _HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", _FFN, _HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", _HIDDEN, _FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary() -> tuple[list[str], list[TokenType], list[str]]:
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    merges = ["1 2", "12 3", "Ġ 1", "a b"]
    tokens = ["<|end|>", *letters, *(merge.replace(" ", "") for merge in merges)]
    types = [TokenType.CONTROL] + [TokenType.NORMAL] * (len(tokens) - 1)
    return tokens, types, merges

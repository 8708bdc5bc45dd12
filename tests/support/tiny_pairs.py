"""Tiny models with a tokenizer: whole directories, and GGUF files."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from mtp import save_tiny_mtp_model
from tiny_gguf import Llama, write_out
from tiny_models import save_tiny_model
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers_for_tests import byte_level_wrapper
from transformers import PreTrainedTokenizerFast


def save_tiny_model_with_tokenizer(path: Path, *, has_mtp: bool = False, **overrides: Any) -> Path:
    """A directory that `resolve` accepts: weights, config and tokenizer."""
    tokenizer = byte_level_wrapper()
    vocab_size = overrides.pop("vocab_size", len(tokenizer))
    save = save_tiny_mtp_model if has_mtp else save_tiny_model
    save(path, vocab_size=vocab_size, **overrides)
    tokenizer.save_pretrained(path)
    return path


def save_tiny_model_with_other_tokenizer(path: Path, **overrides: Any) -> Path:
    """The same, but two letters have exchanged their ids."""
    save_tiny_model_with_tokenizer(path, **overrides)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def save_tiny_model_with_few_tokens(path: Path, **overrides: Any) -> Path:
    """A directory whose tokenizer knows hardly any text."""
    backend = Backend(WordLevel({"<unk>": 0, "the": 1, "of": 2}, unk_token="<unk>"))
    save_tiny_model(path, vocab_size=3, **overrides)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(path)
    return path


def write_tiny_gguf(
    path: Path,
    pre: str = "smollm",
    *,
    architecture: str = "llama",
    metadata: Mapping[str, str | float] = {},
    tensors: Mapping[str, np.ndarray] = {},
    without: Collection[str] = (),
    type_: GGMLQuantizationType = GGMLQuantizationType.F32,
    part_tensors: int = 0,
    small_first: bool = False,
    more_tokens: Mapping[str, TokenType] = {},
    ids: Mapping[str, str] = {"bos": "<|end|>", "eos": "<|end|>"},
    chat_template: str | None = None,
    file_type: int | None = 0,
    end: str = "<|end|>",
) -> Path:
    """A random two-layer llama in float32, with a byte-level tokenizer whose digits can merge.

    With further `metadata` and `tensors`, by name, and without some; its matrices are of `type_`.
    With `part_tensors` of them in a file, it comes in several; returns the first, which has no
    tensors if it is `small_first`. `ids` are tokens by their roles, and `end` is the first token.
    """
    tokens, types, merges = _vocabulary(end)
    tokens += more_tokens
    types += more_tokens.values()
    shape = Llama(len(tokens), hidden=32, heads=4, kv_heads=2, ffn=64, num_layers=2)
    split = {"split_max_tensors": part_tensors, "small_first_shard": small_first}
    writer = shape.writer(path, 128, architecture, **split)
    if file_type is not None:
        writer.add_file_type(file_type)
    _add_vocabulary(writer, pre, tokens, types, merges)
    for role, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", tokens.index(token))
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    rng = np.random.default_rng(0)
    for name, size in shape.tensors():
        values = rng.normal(0, 0.3, size).astype(np.float32)
        if name not in without:
            of = type_ if len(size) > 1 else GGMLQuantizationType.F32
            writer.add_tensor(name, quantize(values, of), raw_dtype=of)
    for key, value in metadata.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values.astype(np.float32))
    write_out(writer)
    return min(path.parent.glob(f"{path.stem}-00001-of-*")) if part_tensors else path


def add_tokenizer(writer: GGUFWriter, pre: str, end: str = "<|end|>") -> None:
    """The same tokenizer for another file."""
    tokens, types, merges = _vocabulary(end)
    _add_vocabulary(writer, pre, tokens, types, merges)
    writer.add_eos_token_id(tokens.index(end))


NUM_TOKENS = 101  # of its vocabulary


def _add_vocabulary(
    writer: GGUFWriter, pre: str, tokens: list[str], types: list[TokenType], merges: list[str]
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)


def _vocabulary(end: str) -> tuple[list[str], list[TokenType], list[str]]:
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    merges = ["1 2", "12 3", "Ġ 1", "a b"]
    tokens = [end, *letters, *(merge.replace(" ", "") for merge in merges)]
    types = [TokenType.CONTROL] + [TokenType.NORMAL] * (len(tokens) - 1)
    return tokens, types, merges

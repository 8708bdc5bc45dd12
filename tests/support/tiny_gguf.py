"""Tiny Llamas as GGUF files, and one in each of their formats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 256, 4, 2, 512, 320
RNG_SEED = 0


class Llama(NamedTuple):
    """The shape of a model."""

    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    num_layers: int

    def writer(
        self, path: Path, max_positions: int, architecture: str = "llama", **split: Any
    ) -> GGUFWriter:
        """Of a file that holds the model's configuration so far; `split` is GGUFWriter's."""
        writer = GGUFWriter(path, architecture, **split)
        writer.add_block_count(self.num_layers)
        writer.add_context_length(max_positions)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.ffn)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_rope_dimension_count(self.hidden // self.heads)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(self.vocab_size)
        return writer

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes."""
        hidden, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        yield "token_embd.weight", (self.vocab_size, hidden)
        yield "output_norm.weight", (hidden,)
        for i in range(self.num_layers):
            yield f"blk.{i}.attn_norm.weight", (hidden,)
            yield f"blk.{i}.ffn_norm.weight", (hidden,)
            yield f"blk.{i}.attn_q.weight", (hidden, hidden)
            yield f"blk.{i}.attn_k.weight", (kv, hidden)
            yield f"blk.{i}.attn_v.weight", (kv, hidden)
            yield f"blk.{i}.attn_output.weight", (hidden, hidden)
            yield f"blk.{i}.ffn_gate.weight", (self.ffn, hidden)
            yield f"blk.{i}.ffn_up.weight", (self.ffn, hidden)
            yield f"blk.{i}.ffn_down.weight", (hidden, self.ffn)


def write_out(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(type_: GGMLQuantizationType, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows of a K-quant, of random codes and small scales: `gguf` cannot write these."""
    block, block_bytes = GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, width // block, block_bytes), dtype=np.uint8)
    # Times -128 to 127, or 0 to 63: so that attention is not all on one key.
    most = 3e-5 if type_ == GGMLQuantizationType.Q6_K else 3e-4
    scale = rng.uniform(most / 4, most, (rows, width // block, 2)).astype(np.float16)
    raw = scale.view(np.uint8).reshape(rows, width // block, 4)
    if type_ == GGMLQuantizationType.Q6_K:
        data[..., -2:] = raw[..., :2]
    else:
        data[..., :4] = raw
    return data.reshape(rows, -1)


def encoded(type_: GGMLQuantizationType, values: np.ndarray, seed: int = 0) -> np.ndarray:
    if type_ in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K):
        return random_blocks(type_, *values.shape, seed=seed)
    return quantize(values, type_)


def write_llama(
    path: Path,
    type_: GGMLQuantizationType,
    output: GGMLQuantizationType,
    num_layers: int = 2,
    *,
    own_output: bool = False,
) -> Path:
    """Its matrices are of `type_`, and its embedding, which is its output layer, too, of `output`.

    With `own_output` it has another matrix as its output layer.
    """
    shape = Llama(VOCAB, HIDDEN, HEADS, KV_HEADS, FFN, num_layers)
    writer, rng = shape.writer(path, 512), np.random.default_rng(RNG_SEED)
    others = [("output.weight", (VOCAB, HIDDEN))] if own_output else []
    for name, size in [*shape.tensors(), *others]:
        if len(size) == 1:
            writer.add_tensor(name, rng.normal(1, 0.1, size).astype(np.float32))
            continue
        of = output if name == "token_embd.weight" else type_
        values = rng.normal(0, 0.1, size).astype(np.float32)
        writer.add_tensor(name, encoded(of, values, seed=size[0] + len(name)), raw_dtype=of)
    write_out(writer)
    return path


def llama_directory(
    folder: Path, type_: GGMLQuantizationType, output: GGMLQuantizationType
) -> Path:
    """A model directory around such a file, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_llama(folder / "model.gguf", type_, output)
    return _write_config(folder, Llama(VOCAB, HIDDEN, HEADS, KV_HEADS, FFN, 2))


def save_quick_llama(
    folder: Path, seed: int, vocab_size: int, num_layers: int = 1, scale: float = 0.15
) -> Path:
    """The least model that a CPU's compiled layers compute: with 240 sequences in a batch, a step
    takes a seventh of the time that it takes with a plain one.
    """
    shape = Llama(vocab_size, hidden=32, heads=2, kv_heads=2, ffn=64, num_layers=num_layers)
    folder.mkdir(parents=True, exist_ok=True)
    writer, rng = shape.writer(folder / "model.gguf", 256), np.random.default_rng(seed)
    for name, size in [*shape.tensors(), ("output.weight", (vocab_size, shape.hidden))]:
        values = rng.normal(0, scale, size).astype(np.float32)
        if len(size) == 1:
            writer.add_tensor(name, np.ones_like(values))
        else:
            of = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, encoded(of, values), raw_dtype=of)
    write_out(writer)
    return _write_config(folder, shape)


def _write_config(folder: Path, shape: Llama) -> Path:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ).save_pretrained(folder)
    return folder

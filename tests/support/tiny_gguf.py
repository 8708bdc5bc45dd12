"""A tiny Llama as a GGUF file, in one of its formats."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 256, 4, 2, 512, 320
RNG_SEED = 0


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
    path: Path, type_: GGMLQuantizationType, head: GGMLQuantizationType, num_layers: int = 2
) -> Path:
    """Its matrices are of `type_`, and its embedding, which is its head, too, of `head`."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    rng = np.random.default_rng(RNG_SEED)

    def plain(name: str, width: int) -> None:
        writer.add_tensor(name, rng.normal(1, 0.1, width).astype(np.float32))

    def matrix(name: str, rows: int, width: int, of: GGMLQuantizationType = type_) -> None:
        values = rng.normal(0, 0.1, (rows, width)).astype(np.float32)
        writer.add_tensor(name, encoded(of, values, seed=rows + len(name)), raw_dtype=of)

    matrix("token_embd.weight", VOCAB, HIDDEN, head)
    plain("output_norm.weight", HIDDEN)
    kv = HIDDEN // HEADS * KV_HEADS
    for i in range(num_layers):
        plain(f"blk.{i}.attn_norm.weight", HIDDEN)
        plain(f"blk.{i}.ffn_norm.weight", HIDDEN)
        matrix(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN)
        matrix(f"blk.{i}.attn_k.weight", kv, HIDDEN)
        matrix(f"blk.{i}.attn_v.weight", kv, HIDDEN)
        matrix(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        matrix(f"blk.{i}.ffn_gate.weight", FFN, HIDDEN)
        matrix(f"blk.{i}.ffn_up.weight", FFN, HIDDEN)
        matrix(f"blk.{i}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_directory(folder: Path, type_: GGMLQuantizationType, head: GGMLQuantizationType) -> Path:
    """A model directory around such a file, without a tokenizer."""
    from transformers import LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    write_llama(folder / "model.gguf", type_, head)
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ).save_pretrained(folder)
    return folder

"""A model of random weights whose layers have the shape of a real one's, made on the spot."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, INNER, KV_HEADS, HEAD_DIM, VOCAB = 4096, 12288, 8, 128, 4096
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def save_random_model(
    path: Path, num_layers: int, *, width: int = WIDTH, inner: int = INNER
) -> None:
    """A model directory without a tokenizer: some layers of Qwen3-8B's shape, in bfloat16, or as
    narrow as is said.
    """
    device, heads = "cuda" if torch.cuda.is_available() else "cpu", width // HEAD_DIM
    kv_heads = min(heads, KV_HEADS)

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * 0.02).bfloat16().cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": randn(VOCAB, width), "model.norm.weight": ones(width)}
    tensors["lm_head.weight"] = randn(VOCAB, width)
    for layer in range(num_layers):
        shapes = {
            "self_attn.q_proj": (heads * HEAD_DIM, width),
            "self_attn.k_proj": (kv_heads * HEAD_DIM, width),
            "self_attn.v_proj": (kv_heads * HEAD_DIM, width),
            "self_attn.o_proj": (width, heads * HEAD_DIM),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        name = f"model.layers.{layer}."
        tensors |= {f"{name}{part}.weight": randn(*shape) for part, shape in shapes.items()}
        for norm, size in (
            ("input_layernorm", width),
            ("post_attention_layernorm", width),
            ("self_attn.q_norm", HEAD_DIM),
            ("self_attn.k_norm", HEAD_DIM),
        ):
            tensors[f"{name}{norm}.weight"] = ones(size)
    save_file(tensors, path / "model.safetensors")
    config = {
        **CONFIG,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": num_layers,
    }
    (path / "config.json").write_text(json.dumps(config))

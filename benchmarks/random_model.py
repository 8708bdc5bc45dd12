"""A model of random weights whose layers have the shape of a real one's, made on the spot."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 12288, 32, 8, 128, 4096
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def save_random_model(path: Path, num_layers: int) -> None:
    """A model directory without a tokenizer: some layers of Qwen3-8B's shape, in bfloat16."""

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * 0.02).bfloat16().cpu()

    def ones(width: int) -> torch.Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": randn(VOCAB, WIDTH), "model.norm.weight": ones(WIDTH)}
    tensors["lm_head.weight"] = randn(VOCAB, WIDTH)
    for layer in range(num_layers):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
        }
        name = f"model.layers.{layer}."
        tensors |= {f"{name}{part}.weight": randn(*shape) for part, shape in shapes.items()}
        for norm, width in (
            ("input_layernorm", WIDTH),
            ("post_attention_layernorm", WIDTH),
            ("self_attn.q_norm", HEAD_DIM),
            ("self_attn.k_norm", HEAD_DIM),
        ):
            tensors[f"{name}{norm}.weight"] = ones(width)
    save_file(tensors, path / "model.safetensors")
    config = {**CONFIG, "num_hidden_layers": num_layers}
    (path / "config.json").write_text(json.dumps(config))

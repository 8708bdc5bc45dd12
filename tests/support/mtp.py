"""Tiny random models whose checkpoints hold an MTP head, and its formulas in plain torch."""

import json
from pathlib import Path

import torch
from heads import PlainLayers, causal
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from torch import Tensor

LAYER = "model.mtp_layers.0"


def save_tiny_mtp_model(
    path: Path, *, seed: int = 0, scale: float = 0.3, **overrides: object
) -> Path:
    """A tiny MiMo and its MTP head, all of random weights, biases and norms too."""
    save_tiny_model(path, "mimo", seed=seed, scale=scale, **overrides)
    config = json.loads((path / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = load_file(path / "model.safetensors")
    first = "model.layers.0."
    of_layer = {
        name.replace(first, f"{LAYER}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(first)
    }
    width = config["hidden_size"]
    own = {f"{LAYER}.input_proj.weight": torch.empty(width, 2 * width)}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        own[f"{LAYER}.{name}.weight"] = torch.empty(width)
    for name, tensor in (tensors | of_layer | own).items():
        drawn = torch.randn(tensor.shape, generator=generator)
        if name in of_layer or name in own or name.endswith(("bias", "norm.weight")):
            is_norm = name.endswith("norm.weight") or (name in own and tensor.ndim == 1)
            tensors[name] = 1 + 0.3 * drawn if is_norm else scale * drawn
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class PlainMtp(PlainLayers):
    """The formulas, row by row and without a cache: every row looks back at all before it."""

    def __init__(self, path: Path) -> None:
        self.told = json.loads((path / "config.json").read_text())
        self.w = load_file(path / "model.safetensors")
        self.head_dim = self.told["head_dim"]
        self.theta = float(self.told["rope_parameters"]["rope_theta"])
        self.eps = self.told["rms_norm_eps"]
        # The states behind all layers and the last norm.
        self.boundaries = [self.told["num_hidden_layers"] + 1]

    def rows(self, h: Tensor, following: list[int]) -> Tensor:
        """s of rows 0, 1, … Shape: h [T, hidden], following [T] -> [T, hidden]."""
        e = self.w["model.embed_tokens.weight"][torch.tensor(following)]
        e[0] = 0
        e, h = self.norm(f"{LAYER}.token_layernorm", e), self.norm(f"{LAYER}.hidden_layernorm", h)
        x = self.linear(f"{LAYER}.input_proj", torch.cat((h, e), -1))
        z = self.norm(f"{LAYER}.input_layernorm", x)
        x = self.layer(LAYER, x, self.attention(f"{LAYER}.self_attn", z, causal(len(z))))
        return self.norm(f"{LAYER}.final_layernorm", x)

    def draft_logits(self, g: Tensor, tokens: list[int], drafts: list[int], vocab: int) -> Tensor:
        """In front of each of k drafts, the last of them unused.

        Shape: g [n - 1 or more, 1, hidden] of the known tokens, tokens [n] -> [k, V].
        """
        h, following, found = g[: len(tokens) - 1, 0], [*tokens[1:]], []
        for draft in drafts:
            s = self.rows(h, following)[-1:]
            found.append(self.linear("lm_head", s))
            h = torch.cat((h, s))
            following.append(draft)
        assert found[0].shape[1] == vocab
        return torch.cat(found)

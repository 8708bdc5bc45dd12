"""Tiny random models whose checkpoints hold an MTP head, and its formulas in plain torch.

Those of hybrids have transformers' own layers.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as functional
from engines import GREEDY, engine_config, prompts
from heads import PlainLayers, causal
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, save_tiny_model, with_stacked_experts
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine.api import NewRequest
from outrider.engine.engine import Engine

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


def save_tiny_hybrid(path: Path, architecture: str = "qwen3_5_text", **overrides: object) -> Path:
    """A tiny hybrid and its MTP head, all of random weights."""
    save_tiny_model(path, architecture, **overrides)
    tensors = load_file(path / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    own = {"mtp.fc.weight": torch.empty(width, 2 * width)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        own[f"mtp.{name}.weight"] = torch.empty(width)
    first = f"model.layers.{_full_layer(path)}."
    for name, tensor in tensors.items():
        if name.startswith(first):
            own[name.replace(first, "mtp.layers.0.")] = tensor
    generator = torch.Generator().manual_seed(1)
    own = {name: 0.3 * torch.randn(t.shape, generator=generator) for name, t in own.items()}
    save_file(tensors | own, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _full_layer(path: Path) -> int:
    layer_types: list[str] = json.loads((path / "config.json").read_text())["layer_types"]
    return layer_types.index("full_attention")


def check_drafts(path: Path, meant: Path) -> None:
    """Answer with the hybrid at `path`; its MTP head must draft what that of `meant` drafts."""
    engine = Engine(engine_config(path, path, k=2))
    assert engine.info.proposer == "mtp"
    [known], head = prompts([9], VOCAB), PlainHybrid(meant)
    new = NewRequest(request_id="", prompt_token_ids=known, params=GREEDY, returns_drafts=True)
    engine.submit([new])
    known, num_drafts = list(known), 0
    while engine.has_work():
        for output in engine.step():
            if drafts := output.draft_token_ids:
                assert drafts == head.drafts(known, len(drafts))
                num_drafts += len(drafts)
            known += output.token_ids
    assert num_drafts > 20


class PlainHybrid:
    """What the MTP head of a hybrid drafts, from nothing but the tokens."""

    def __init__(self, path: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.w = load_file(path / "model.safetensors")
        self.model, self.layer = model, model.model.layers[_full_layer(path)]
        self.mine = {name: t.clone() for name, t in self.layer.state_dict().items()}
        of_layer = {name: t for name, t in self.w.items() if name.startswith("mtp.layers.0.")}
        of_layer = with_stacked_experts(of_layer)
        self.own = {name.removeprefix("mtp.layers.0."): t for name, t in of_layer.items()}

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = 1 + self.w[f"mtp.{name}.weight"]
        return functional.rms_norm(x, weight.shape, weight, self.model.config.rms_norm_eps)

    @torch.inference_mode()
    def drafts(self, known: list[int], k: int) -> list[int]:
        """The likeliest k tokens behind the known ones."""
        self.layer.load_state_dict(self.mine)
        h = self.model.model(torch.tensor([known])).last_hidden_state[0, :-1]
        self.layer.load_state_dict(self.own)
        following, found = known[1:], list[int]()
        for _ in range(k):
            e = self.model.model.embed_tokens(torch.tensor(following))
            both = (self.norm("pre_fc_norm_embedding", e), self.norm("pre_fc_norm_hidden", h))
            x = (torch.cat(both, -1) @ self.w["mtp.fc.weight"].T)[None]
            places = torch.arange(len(following))[None]
            if hasattr(self.model.model.rotary_emb, "mrope_section"):
                places = places.expand(3, 1, -1)  # time, height and width
            mask = torch.full((len(following), len(following)), -torch.inf).triu(1)[None, None]
            rotary = self.model.model.rotary_emb(x, places)
            x = self.layer(x, position_embeddings=rotary, attention_mask=mask)
            s = self.norm("norm", x[0, -1:])
            found.append(int(self.model.lm_head(s).argmax()))
            following, h = [*following, found[-1]], torch.cat((h, s))
        return found

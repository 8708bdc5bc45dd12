"""Tiny random models whose checkpoints hold an MTP head, and its formulas in plain torch.

Those of hybrids have transformers' own layers.
"""

import json
from pathlib import Path
from typing import NamedTuple

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

LAYER = "model.mtp_layers.0"  # of a MiMo
GLM_LAYER = "model.layers.3"  # of a tiny GLM, behind its own layers


class Named(NamedTuple):
    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str


NAMES = {
    "mimo": Named(LAYER, "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    "glm4_moe": Named(GLM_LAYER, "eh_proj", "enorm", "hnorm", "shared_head.norm"),
}


def save_tiny_mtp_model(
    path: Path,
    architecture: str = "mimo",
    *,
    seed: int = 0,
    scale: float = 0.3,
    **overrides: object,
) -> Path:
    """A tiny target and its MTP head, all of random weights, biases and norms too."""
    save_tiny_model(path, architecture, seed=seed, scale=scale, **overrides)
    config = json.loads((path / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = load_file(path / "model.safetensors")
    layer, projection, *norms = NAMES[architecture]
    # Of a GLM, the first layer has no experts.
    alike = "model.layers.1." if architecture == "glm4_moe" else "model.layers.0."
    of_layer = {
        name.replace(alike, f"{layer}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(alike)
    }
    width = config["hidden_size"]
    own = {f"{layer}.{projection}.weight": torch.empty(width, 2 * width)}
    own |= {f"{layer}.{name}.weight": torch.empty(width) for name in norms}
    for name, tensor in (tensors | of_layer | own).items():
        drawn = torch.randn(tensor.shape, generator=generator)
        if name in of_layer or name in own or name.endswith(("bias", "norm.weight")):
            is_norm = name.endswith("norm.weight") or (name in own and tensor.ndim == 1)
            tensors[name] = 1 + 0.3 * drawn if is_norm else scale * drawn
    if architecture == "glm4_moe":  # its files also have copies of what it shares with the target
        tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class PlainMtp(PlainLayers):
    """The formulas, row by row and without a cache: every row looks back at all before it."""

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.named = NAMES[self.config["model_type"]]
        self.w = load_file(path / "model.safetensors")
        self.head_dim = self.config["head_dim"]
        rope = self.config["rope_parameters"]
        self.theta = float(rope["rope_theta"])
        self.rotated = int(self.head_dim * rope.get("partial_rotary_factor", 1))
        self.eps = self.config["rms_norm_eps"]
        # The states behind all layers and the last norm.
        self.boundaries = [self.config["num_hidden_layers"] + 1]

    def rows(self, h: Tensor, following: list[int]) -> Tensor:
        """s of rows 0, 1, … Shape: h [T, hidden], following [T] -> [T, hidden]."""
        layer, *own = self.named
        projection, of_e, of_h, norm = (f"{layer}.{name}" for name in own)
        e = self.w["model.embed_tokens.weight"][torch.tensor(following)]
        if self.config["model_type"] == "mimo":
            e[0] = 0
        e, h = self.norm(of_e, e), self.norm(of_h, h)
        both = (h, e) if self.config["model_type"] == "mimo" else (e, h)
        x = self.linear(projection, torch.cat(both, -1))
        z = self.norm(f"{layer}.input_layernorm", x)
        x = self.layer(layer, x, self.attention(f"{layer}.self_attn", z, causal(len(z))))
        return self.norm(norm, x)

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        """A GLM rotates the first numbers of a head."""
        turned = super()._rotated(x[..., : self.rotated], first)
        return torch.cat((turned, x[..., self.rotated :]), -1)

    def mlp(self, name: str, z: Tensor) -> Tensor:
        """A GLM's: experts with the largest sigmoids plus bias, among those of the best groups; and
        one that all rows share.
        """
        if f"{name}.mlp.gate.weight" not in self.w:
            return super().mlp(name, z)
        scores = self.linear(f"{name}.mlp.gate", z).sigmoid()
        chosen_by = scores + self.w[f"{name}.mlp.gate.e_score_correction_bias"]
        groups = chosen_by.unflatten(1, (self.config["n_group"], -1))
        best = groups.topk(2, 2).values.sum(2).topk(self.config["topk_group"]).indices
        is_best = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, value=True)
        among = groups.masked_fill(~is_best[:, :, None], -torch.inf).flatten(1)
        ids = among.topk(self.config["num_experts_per_tok"]).indices
        chosen = torch.zeros_like(scores).scatter(1, ids, scores.gather(1, ids))
        shares = self.config["routed_scaling_factor"] * chosen / chosen.sum(1, keepdim=True)
        experts = (self.gated(f"{name}.mlp.experts.{i}", z) for i in range(shares.shape[1]))
        routed = [share[:, None] * y for share, y in zip(shares.T, experts, strict=True)]
        return self.gated(f"{name}.mlp.shared_experts", z) + sum(routed)

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
        theirs = model.model.embed_tokens.weight
        is_dedicated = getattr(model.config, "mtp_use_dedicated_embeddings", False)
        self.embedding = self.w.get("mtp.embed_tokens.weight", theirs) if is_dedicated else theirs

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
            e = functional.embedding(torch.tensor(following), self.embedding)
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


def as_published(path: Path, folder: Path) -> Path:
    """The same model as the text of one that reads images, with an MTP head beside it."""
    folder.mkdir()
    config = json.loads((path / "config.json").read_text())
    model_type = config["model_type"].removesuffix("_text")
    whole = {"model_type": model_type, "text_config": config, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(4)
    tensors["mtp.norm.weight"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

"""Tiny random heads on disk that draft blocks (DFlash, DFlash2, DSpark), and their formulas."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from heads import MASK, PlainLayers, RandomWeights, layers_config, tensors_of
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig


def save_tiny_block_head(
    path: Path,
    target: Path,
    *,
    boundaries: tuple[int, ...] = (1, 2, 4),
    speculators: bool = False,
    draft_vocab: int | None = None,
    num_layers: int = 2,
    block_size: int = 5,
    markov: str | None = None,
    rank: int = 6,
    confidence: str | None = None,  # "states" or, with the token before, "token"
    from_anchor: bool | None = None,
    windows: tuple[int | None, ...] | None = None,
    is_causal: bool | None = None,
    nested: bool = True,
    own_embedding: bool = False,
    own_output: bool = False,
    head_norms: bool = True,
    convolution: tuple[int, int] = (2, 8),  # taps, and channels of a group
    selector: tuple[int, int] | None = None,  # its rank, and how many candidates a row has
    keys: Mapping[str, object] = {},
    seed: int = 0,
    scale: float = 0.3,
) -> Path:
    """A head of random weights for a tiny target: DSpark with a Markov head, DFlash2 with a
    selector, else DFlash. `keys` are more of the config.
    """
    stated = AutoConfig.from_pretrained(target)
    vocab, width = stated.vocab_size, stated.hidden_size
    random = RandomWeights(seed, scale)
    matrix, norm = random.matrix, random.norm
    size = draft_vocab or vocab
    tensors = {"fc.weight": matrix(width, len(boundaries) * width)}
    tensors |= {"norm.weight": norm(width), "hidden_norm.weight": norm(width)}
    if draft_vocab is not None:
        ids = random.drafted_ids(vocab, draft_vocab)
        tensors["d2t"] = ids - torch.arange(draft_vocab)
    if draft_vocab is not None or own_output:
        tensors["lm_head.weight"] = matrix(size, width)
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, width)
    for i in range(num_layers):
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= random.layer(f"layers.{i}", width, width, norms, head_norms=head_norms)
    own: dict[str, Any] = {"mask_token_id": MASK, **keys}
    if selector is not None:
        (taps, group), (rank, top_k) = convolution, selector
        own |= {"conv_kernel_size": taps, "conv_group_size": group}
        own |= {"selector_rank": rank, "selector_top_k": top_k}
        for i in range(num_layers):
            for name in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                tensors[f"{name}.base_kernel"] = 0.5 + matrix(2, taps, width)
                num_taps = 2 * taps * width // group  # of a row
                tensors[f"{name}.kernel_projection.weight"] = matrix(num_taps, width) / 3
        tensors["candidate_selector.predecessor_codebook"] = matrix(vocab, rank) / scale
        tensors["candidate_selector.successor_codebook"] = matrix(vocab, rank)
        tensors["candidate_selector.hidden_projection.weight"] = matrix(rank, width)
    if markov is not None:
        tensors["markov_head.markov_w1.weight"] = matrix(vocab, rank) / scale
        tensors["markov_head.markov_w2.weight"] = matrix(size, rank)
        own |= {"markov_rank": rank, "markov_head_type": markov}
    if confidence is not None:
        inputs = width + (rank if confidence == "token" else 0)
        tensors["confidence_head.proj.weight"] = matrix(1, inputs)
        tensors["confidence_head.proj.bias"] = matrix(1)
        own |= {"enable_confidence_head": True, "confidence_head_with_markov": inputs > width}
    if from_anchor is not None:
        own["sample_from_anchor"] = from_anchor
    if is_causal is not None:
        own["is_causal"] = is_causal
    layers = layers_config("qwen3", width, num_layers, vocab)
    if windows is not None:
        types = ("full_attention", "sliding_attention")
        layers["layer_types"] = [types[window is not None] for window in windows]
        layers["sliding_window"] = max(window or 0 for window in windows)
    kind = "dflash2" if selector else "dflash" if markov is None else "dspark"
    config: dict[str, Any]
    if speculators:
        own |= {"block_size": block_size, "aux_hidden_state_layer_ids": list(boundaries)}
        own["draft_vocab_size"] = size
        config = {"speculators_model_type": kind, "transformer_layer_config": layers} | own
    else:
        own["target_layer_ids"] = [b - 1 for b in boundaries]
        names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
        name = names.get(kind, "Qwen3DSparkModel")
        config = {"architectures": [name], "block_size": block_size, **layers}
        if draft_vocab is not None:
            config["draft_vocab_size"] = size
        config |= {"dflash_config": own} if nested else own
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


class PlainBlockHead(PlainLayers):
    """The formulas over the whole context at once, without a cache."""

    def __init__(self, path: Path, target_embedding: Tensor, target_head: Tensor) -> None:
        stated = json.loads((path / "config.json").read_text())
        self.own = stated | stated.get("dflash_config", {})
        self.layers = stated.get("transformer_layer_config", stated)
        self.w = tensors_of(path)
        self.embedding = self.w.get("embed_tokens.weight", target_embedding)
        self.head = self.w.get("lm_head.weight", target_head)
        ids = self.own.get("target_layer_ids")
        self.boundaries: list[int] = (
            self.own["aux_hidden_state_layer_ids"] if ids is None else [i + 1 for i in ids]
        )
        is_native_dspark = "DSpark" in "".join(stated.get("architectures", []))
        self.from_anchor = self.own.get("sample_from_anchor", is_native_dspark)

    def states(self, g: Tensor, anchor: int, k: int) -> Tensor:
        """h of the rows that predict drafts 1 to k. Shape: g [n, m, H] -> [k, H]."""
        c = self.norm("hidden_norm", self.linear("fc", g.flatten(1)))
        num_rows = k if self.from_anchor else k + 1
        x = self.embedding[[anchor] + [MASK] * (num_rows - 1)]
        x = x * self.own.get("input_embedding_scale", 1.0)
        for i in range(self.layers["num_hidden_layers"]):
            name = f"layers.{i}"
            z = self.norm(f"{name}.input_layernorm", x)
            attend = partial(
                self.attention, f"{name}.self_attn", seen=self.seen(i, len(c), num_rows), context=c
            )
            x = x + self.convolved(f"{name}.attention_conv", z, attend)
            z = self.norm(f"{name}.post_attention_layernorm", x)
            x = x + self.convolved(f"{name}.mlp_conv", z, partial(self.mlp, name))
        return self.norm("norm", x)[-k:]

    def convolved(self, name: str, n: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """conv_1(part(conv_0(n))), if the head has these convolutions. Shape: [T, hidden]."""
        if f"{name}.base_kernel" not in self.w:
            return part(n)
        base = self.w[f"{name}.base_kernel"]
        delta = self.linear(f"{name}.kernel_projection", n).view(len(n), *base.shape[:2], -1)
        taps = base + delta.repeat_interleave(n.shape[1] // delta.shape[-1], -1)

        def convolve(side: int, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for i in range(len(x)):
                for t in range(min(i + 1, taps.shape[2])):
                    out[i] += taps[i, side, t] * x[i - t]
            return out

        return convolve(1, part(convolve(0, n)))

    def seen(self, i: int, n: int, rows: int) -> Tensor:
        """What each row of layer i sees of n of the context and of the block. Shape: [T, n + T]."""
        types = self.layers.get("layer_types") or ["full_attention"] * (i + 1)
        is_sliding = types[i] == "sliding_attention"
        seen = torch.ones(rows, n + rows, dtype=torch.bool)
        ahead = torch.arange(n + rows) - torch.arange(n, n + rows)[:, None]
        if self.own.get("is_causal", is_sliding):
            seen &= ahead <= 0
        if is_sliding:
            seen &= ahead > -self.layers["sliding_window"]
        return seen

    def draft_logits(self, g: Tensor, tokens: list[int], drafts: list[int], vocab: int) -> Tensor:
        """In front of each of k drafts, the last of them unused.

        Shape: g [n, m, H] or more, tokens [n + 1] -> [k, V].
        """
        k = len(drafts)
        h = self.states(g[: len(tokens) - 1], tokens[-1], k)
        previous = [tokens[-1], *drafts[:-1]]
        logits = h @ self.head.T * self.own.get("output_multiplier", 1.0)
        if cap := self.own.get("final_logit_softcapping"):
            logits = cap * (logits / cap).tanh()
        logits = self.selected(h, logits + self.markov(previous), previous)
        if "d2t" not in self.w:
            return logits
        wide = torch.full((k, vocab), -torch.inf)
        wide[:, torch.arange(len(self.w["d2t"])) + self.w["d2t"]] = logits
        return wide

    def selected(self, h: Tensor, logits: Tensor, previous: list[int]) -> Tensor:
        """The scores of each row's candidates, if there is a selector. Shape: [k, V]."""
        if not self.own.get("selector_rank"):
            return logits
        name = "candidate_selector"
        pre, suc = (self.w[f"{name}.{side}_codebook"] for side in ("predecessor", "successor"))
        projected = self.linear(f"{name}.hidden_projection", h)
        scores = torch.full_like(logits, -torch.inf)
        for i, token in enumerate(previous):
            for c in logits[i].topk(self.own["selector_top_k"]).indices.tolist():
                scores[i, c] = logits[i, c] + (pre[token] * projected[i] * suc[c]).sum()
        return scores

    def markov(self, previous: list[int]) -> Tensor:
        """What the token before each row adds. Shape: [k, V']."""
        if not self.own.get("markov_rank"):
            return torch.zeros(1)
        w1, w2 = (self.w[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
        return w1[previous] @ w2.T

    def confidence(self, g: Tensor, tokens: list[int], drafts: list[int]) -> Tensor:
        """How likely each of k drafts is accepted. Shape: as draft_logits -> [k]."""
        h = self.states(g[: len(tokens) - 1], tokens[-1], len(drafts))
        if self.own["confidence_head_with_markov"]:
            previous = [tokens[-1], *drafts[:-1]]
            h = torch.cat((h, self.w["markov_head.markov_w1.weight"][previous]), -1)
        return self.linear("confidence_head.proj", h).squeeze(-1).sigmoid()

"""Tiny random EAGLE-3 heads on disk, and their formulas in plain torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INNER = 4, 2, 8, 48
THETA, EPS = 500.0, 1e-5
MASK = 2


def layers_config(model_type: str, width: int, num_layers: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "model_type": model_type,
    }


class RandomWeights:
    """The tensors of a head, drawn one after the other."""

    def __init__(self, seed: int, scale: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * self._scale

    def norm(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self._generator)

    def layer(
        self, name: str, inputs: int, width: int, norms: Sequence[str], *, head_norms: bool
    ) -> dict[str, Tensor]:
        """A decoder layer whose attention reads `inputs` numbers."""
        shapes = {
            "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, inputs),
            "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, inputs),
            "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, inputs),
            "self_attn.o_proj": (width, NUM_HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, width),
            "mlp.up_proj": (INNER, width),
            "mlp.down_proj": (width, INNER),
        }
        tensors = {part: self.matrix(*shape) for part, shape in shapes.items()}
        tensors |= {part: self.norm(width) for part in norms}
        if head_norms:
            tensors |= {f"self_attn.{part}": self.norm(HEAD_DIM) for part in ("q_norm", "k_norm")}
        return {f"{name}.{part}.weight": tensor for part, tensor in tensors.items()}

    def drafted_ids(self, vocab: int, draft_vocab: int) -> Tensor:
        """The target's ids of the draft's tokens, ascending."""
        return torch.randperm(vocab, generator=self._generator)[:draft_vocab].sort().values


def save_tiny_head(
    path: Path,
    target: Path,
    *,
    boundaries: tuple[int, ...] = (1, 2, 4),
    speculators: bool = False,
    draft_vocab: int | None = None,
    hidden_size: int | None = None,
    num_layers: int = 1,
    seed: int = 0,
    scale: float = 0.3,
    head_norms: bool = False,
    own_embedding: bool = False,
    parallel: bool = False,
    pickled: bool = False,
    **flags: bool,
) -> Path:
    """A head of random weights for a tiny target, whose ids it drafts `draft_vocab` of."""
    stated = AutoConfig.from_pretrained(target)
    vocab, theirs = stated.vocab_size, stated.hidden_size
    width = hidden_size or theirs
    random = RandomWeights(seed, scale)
    matrix, norm = random.matrix, random.norm
    m, size = len(boundaries), draft_vocab or vocab
    tensors = {"fc.weight": matrix(width, m * theirs), "norm.weight": norm(width)}
    tensors["lm_head.weight"] = matrix(size, width)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(theirs) for i in range(m)}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(m * theirs)
    if own_embedding or width != theirs:
        tensors["embed_tokens.weight"] = matrix(vocab, width)
    for i in range(num_layers):
        layer = f"layers.{i}" if speculators or i > 0 else "midlayer"
        inputs = 2 * width if i == 0 else width
        norms = ["input_layernorm", "post_attention_layernorm", "hidden_norm"][: 2 + (i == 0)]
        tensors |= random.layer(layer, inputs, width, norms, head_norms=head_norms)
    if parallel:
        tensors["mask_hidden"] = matrix(1, 1, m * theirs) / scale
    if draft_vocab is not None:
        ids = random.drafted_ids(vocab, draft_vocab)
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    layers = layers_config("llama", width, num_layers, vocab)
    config: dict[str, Any] = {"draft_vocab_size": size, **flags}
    if width != theirs:
        config["target_hidden_size"] = theirs
    config["eagle_aux_hidden_state_layer_ids"] = list(boundaries)
    if speculators:
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layers}
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **layers}
    if parallel:
        config["mask_token_id" if speculators else "ptd_token_id"] = MASK
        if speculators:
            config["speculators_model_type"] = "peagle"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    if (path / "pytorch_model.bin").exists():
        loaded: dict[str, Tensor] = torch.load(path / "pytorch_model.bin", weights_only=True)
        return loaded
    return load_file(path / "model.safetensors")


class PlainLayers:
    """Decoder layers by their formulas, of whole sequences and without a cache."""

    w: dict[str, Tensor]
    head_dim, theta, eps = HEAD_DIM, THETA, EPS

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def layer(self, name: str, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from x in front of it and the output of its attention."""
        x = x + attended
        return x + self.mlp(name, self.norm(f"{name}.post_attention_layernorm", x))

    def mlp(self, name: str, z: Tensor) -> Tensor:
        return self.gated(f"{name}.mlp", z)

    def gated(self, name: str, z: Tensor) -> Tensor:
        gate, up = (self.linear(f"{name}.{n}_proj", z) for n in ("gate", "up"))
        return self.linear(f"{name}.down_proj", torch.nn.functional.silu(gate) * up)

    def attention(
        self, name: str, z: Tensor, seen: Tensor, context: Tensor | None = None
    ) -> Tensor:
        """Of the rows z over the context, if there is one, and themselves.

        Shape: z [T, hidden], context [n, hidden], seen [T, n + T] bool.
        """
        both = z if context is None else torch.cat((context, z))
        q, k, v = (
            self.linear(f"{name}.{n}_proj", of).unflatten(-1, (-1, self.head_dim))
            for n, of in zip("qkv", (z, both, both), strict=True)
        )
        if f"{name}.q_norm.weight" in self.w:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k = self._rotated(q, len(both) - len(z)), self._rotated(k, 0)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * self.head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.linear(f"{name}.o_proj", torch.einsum("hts,shd->thd", weights, v).flatten(1))

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        """RoPE at positions from `first` on. Shape: [T, heads, rotated]."""
        inv_freq = self.theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
        angle = (torch.arange(first, first + len(x))[:, None] * inv_freq)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def causal(num_rows: int) -> Tensor:
    return torch.ones(num_rows, num_rows).tril().bool()


class PlainHead(PlainLayers):
    """The formulas, row by row and without a cache: every row looks back at all before it."""

    def __init__(self, path: Path, target_embedding: Tensor) -> None:
        self.stated = json.loads((path / "config.json").read_text())
        self.w = tensors_of(path)
        self.embedding = self.w.get("embed_tokens.weight", target_embedding)
        self.boundaries: list[int] = self.stated["eagle_aux_hidden_state_layer_ids"]
        layers = self.stated.get("transformer_layer_config", self.stated)
        first = "midlayer" if "midlayer.hidden_norm.weight" in self.w else "layers.0"
        self.layers = [first, *(f"layers.{i}" for i in range(1, layers["num_hidden_layers"]))]

    def fused(self, g: Tensor) -> Tensor:
        """[T, m, H] -> [T, hidden]."""
        if "fc_norm.0.weight" in self.w:
            g = torch.stack([self.norm(f"fc_norm.{i}", g[:, i]) for i in range(g.shape[1])], 1)
        g = g.flatten(1)
        if "input_norm.weight" in self.w:
            g = self.norm("input_norm", g)
        return g @ self.w["fc.weight"].T

    def rows(self, f: Tensor, tokens: Tensor) -> Tensor:
        """y of rows 0, 1, … with these f and next tokens.

        Shape: [T, hidden], [T] -> [T, hidden].
        """
        first = self.layers[0]
        e = self.norm(f"{first}.input_layernorm", self.embedding[tokens])
        a = self.norm(f"{first}.hidden_norm", f)
        x = a if self.stated.get("norm_before_residual") else f
        for layer in self.layers:
            z = torch.cat((e, a), -1)
            if layer != first:
                z = self.norm(f"{layer}.input_layernorm", x)
            attended = self.attention(f"{layer}.self_attn", z, causal(len(z)))
            x = self.layer(layer, x, attended)
        return x

    def recycled(self, y: Tensor) -> Tensor:
        return self.norm("norm", y) if self.stated.get("norm_output") else y

    def logits(self, y: Tensor, vocab: int) -> Tensor:
        """[N, hidden] -> [N, V], -inf where the draft has no token."""
        narrow = self.norm("norm", y) @ self.w["lm_head.weight"].T
        if "d2t" not in self.w:
            return narrow
        ids = torch.arange(len(self.w["d2t"])) + self.w["d2t"]
        wide = torch.full((len(y), vocab), -torch.inf)
        wide[:, ids] = narrow
        return wide

    def draft_logits(self, g: Tensor, tokens: list[int], drafts: list[int], vocab: int) -> Tensor:
        """In front of each of k drafts, the last of them unused.

        Shape: g [n - 1 or more, m, H] of the known tokens' positions, tokens [n] -> [k, V].
        """
        n = len(tokens)
        f = self.fused(g[: n - 1])
        if "mask_hidden" in self.w:
            masks = self.fused(self.w["mask_hidden"].view(1, *g.shape[1:])).repeat(
                len(drafts) - 1, 1
            )
            following = [*tokens[1:], *[MASK] * len(masks)]
            y = self.rows(torch.cat((f, masks)), torch.tensor(following))
            return self.logits(y[n - 2 :], vocab)
        following = [*tokens[1:]]
        found = []
        for draft in drafts:
            y = self.rows(f, torch.tensor(following))[-1:]
            found.append(self.logits(y, vocab))
            f = torch.cat((f, self.recycled(y)))
            following.append(draft)
        return torch.cat(found)

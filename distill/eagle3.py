"""An EAGLE-3 head in training: it sees what it will see when served, several drafts in a row.

In step i of the training-time test, row t gets the gold token at t + i + 1 and, from the second
step on, its own output of the step before. Its query stands at position t + i. It attends to the
first step's rows up to t, and to its own rows of the later steps: just what a head sees that has
drafted i tokens. The formulas are those of `engine/models/heads/eagle3.py`.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outrider.engine.models.admission import max_positions

from .head import Drafted, HeadModule, write_head
from .recipe import DistillError, Recipe

_WEIGHT_STD = 0.02
_FROM_TARGET = ("num_key_value_heads", "rms_norm_eps", "intermediate_size", "rope_parameters")
# Key and value of a step so far: [B, heads, L, head_dim] each.
_Seen = tuple[Tensor, Tensor]
_MOST_DRAFT_TOKENS = ((64_000, 32_000), (16_000, 8_192))  # (vocabulary above, most draft tokens)


def check_target(config: PreTrainedConfig) -> None:
    """Refuse a target that is not of Llama's form, which a head takes over."""
    of_text = config.get_text_config()
    missing = [name for name in _FROM_TARGET if getattr(of_text, name, None) is None]
    if missing:
        raise DistillError(
            f"kind: no head can be made for a {config.model_type}, whose config has no "
            f"{' and no '.join(missing)}; leave kind out and make a draft"
        )


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer, as in heads whose config names none; fewer if the target
    has few layers.
    """
    found = {2, num_layers // 2, num_layers - 3}
    if num_layers < 6 or len(found) < 3:
        found = {1, (num_layers + 1) // 2, num_layers - 1}
    return tuple(sorted(b for b in found if 0 < b < num_layers))


def draft_tokens(token_ids: Tensor, vocab_size: int, asked: int) -> Tensor:
    """The most frequent ids of the target's text, ascending, which are drafted. Shape: [V']."""
    size = asked or next((n for above, n in _MOST_DRAFT_TOKENS if vocab_size > above), vocab_size)
    counts = torch.bincount(token_ids.long(), minlength=vocab_size)
    order = counts.sort(descending=True, stable=True).indices
    return order[: min(size, vocab_size)].sort().values


class Eagle3Module(HeadModule):
    def __init__(self, target: PreTrainedModel, target_ids: Tensor, boundaries: tuple[int, ...]):
        """Shape: target_ids [V'], the target's id of each drafted token."""
        super().__init__()
        of_text = target.config.get_text_config()
        self.take_over(target, target_ids)
        self.boundaries = boundaries
        self.num_heads, self.num_kv_heads = of_text.num_attention_heads, of_text.num_key_value_heads
        self.head_dim = getattr(of_text, "head_dim", None) or of_text.hidden_size // self.num_heads
        self.eps = of_text.rms_norm_eps
        self.rope_theta = float(of_text.rope_parameters.get("rope_theta") or 10000.0)
        width, inner = of_text.hidden_size, of_text.intermediate_size

        def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
            made = nn.Linear(num_inputs, num_outputs, bias=False)
            nn.init.normal_(made.weight, std=_WEIGHT_STD)
            return made

        self.fc = linear(len(boundaries) * width, width)
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(2 * width, q),
                        "k_proj": linear(2 * width, kv),
                        "v_proj": linear(2 * width, kv),
                        "o_proj": linear(q, width),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": linear(width, inner),
                        "up_proj": linear(width, inner),
                        "down_proj": linear(inner, width),
                    }
                ),
                **{
                    name: nn.RMSNorm(width, self.eps)
                    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
                },
            }
        )
        self.norm = nn.RMSNorm(width, self.eps)
        self.lm_head = nn.Linear(width, len(target_ids), bias=False)
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}  # without stretching
        config = LlamaConfig(head_dim=self.head_dim, rope_parameters=rope)
        self.rotary = LlamaRotaryEmbedding(config)
        self.to(self.device)
        with torch.no_grad():  # starts out like a target that stops at its last tap
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -width:] += torch.eye(width, device=self.device)
            self.lm_head.weight.copy_(self._of_target[1][self.get_buffer("target_ids")])
            self.norm.weight.copy_(target.get_decoder().norm.weight)

    def forward(
        self, states: Tensor, next_ids: Tensor, mask: Tensor, num_drafts: int, rows: slice
    ) -> list[Drafted]:
        f = self.fc(states.flatten(2).float())
        length = f.shape[1]
        seen: list[_Seen] = []
        found = []
        for i in range(num_drafts):
            f = self._layer(f, next_ids[:, i : i + length], mask, seen)
            found.append(Drafted(self.lm_head(self.norm(f[:, rows]))))
        return found

    def _layer(self, f: Tensor, ids: Tensor, mask: Tensor, seen: list[_Seen]) -> Tensor:
        layer: Any = self.midlayer
        e = layer["input_layernorm"](F.embedding(ids, self._of_target[0]).float())
        z = torch.cat((e, layer["hidden_norm"](f)), -1)
        x = f + self._attention(layer["self_attn"], z, mask, seen)
        z, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
        y: Tensor = x + mlp["down_proj"](F.silu(mlp["gate_proj"](z)) * mlp["up_proj"](z))
        return y

    def _attention(self, parts: Any, z: Tensor, mask: Tensor, seen: list[_Seen]) -> Tensor:
        batch, length, _ = z.shape
        positions = torch.arange(length, device=z.device)[None] + len(seen)

        def heads(name: str) -> Tensor:
            made: Tensor = parts[name](z)
            return made.view(batch, length, -1, self.head_dim).transpose(1, 2)

        group = self.num_heads // self.num_kv_heads
        query, key = apply_rotary_pos_emb(
            heads("q_proj"), heads("k_proj"), *self.rotary(z, positions)
        )
        query = query * self.head_dim**-0.5
        seen.append((key.repeat_interleave(group, 1), heads("v_proj").repeat_interleave(group, 1)))
        (first_key, first_value), *own = seen
        first = (query @ first_key.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
        scores = [(query * key).sum(-1, keepdim=True) for key, _ in own]
        weight = torch.cat((first, *scores), -1).softmax(-1)
        out = weight[..., :length] @ first_value
        for j, (_, value) in enumerate(own):
            out = out + weight[..., length + j, None] * value
        mixed: Tensor = parts["o_proj"](out.transpose(1, 2).flatten(2))
        return mixed

    def export(self, target: PreTrainedModel, folder: Path) -> None:
        """Save it in the form that vLLM and SGLang read: flat config, weights in bfloat16."""
        of_text = target.config.get_text_config()
        ids = self.get_buffer("target_ids").cpu()
        vocab_size = len(self._of_target[0])
        tensors = self.state_dict()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": of_text.hidden_size,
            "intermediate_size": of_text.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "vocab_size": vocab_size,
            "draft_vocab_size": len(ids),
            "max_position_embeddings": max_positions(target.config),
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": of_text.bos_token_id,
            "eos_token_id": of_text.eos_token_id,
            "eagle_aux_hidden_state_layer_ids": list(self.boundaries),
            "eagle_config": {"use_aux_hidden_state": True},
        }
        write_head(folder, tensors, config)


def new_head(target: PreTrainedModel, recipe: Recipe, token_ids: Tensor) -> Eagle3Module:
    """An untrained head for this text of the target: [T]."""
    vocab_size = target.get_input_embeddings().get_parameter("weight").shape[0]
    ids = draft_tokens(token_ids.cpu(), vocab_size, recipe.draft_vocab)
    boundaries = default_boundaries(target.config.get_text_config().num_hidden_layers)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return Eagle3Module(target, ids, boundaries)

"""A head in training that drafts whole blocks: DFlash, DFlash2 or DSpark, going on from another.

Behind a row of the target stands a block as in serving: the next token (the anchor) and masks, at
the positions that follow. Its rows attend to the target's states up to that row, of which each
layer makes keys and values, and to their own block. All blocks of a text pass at once; a mask keeps
them apart. The formulas are those of `engine/models/heads/block_head.py`.

The first drafts of a block count most, because the others are for nothing once one is rejected:
draft i weighs exp(-i / g). Published heads have g = 7 for blocks of 16, 5 for 10 and 4 for 8
(DFlash, arXiv 2602.06036).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from outrider.engine.models.families.base import window_of
from outrider.engine.models.heads.config import HeadConfig, HeadError, head_kind
from outrider.engine.models.heads.vocabulary import check_mask_token, ids_of_target

from .block_parts import Confidence, Convolution, Markov, SelectorModule
from .head import Drafted, HeadModule, config_to_keep, stored_head, tensors_of, write_head
from .recipe import DistillError, Recipe

TRAINED_KINDS = ("dflash", "dflash2", "dspark")
_FC = "fc.weight"
_EMBEDDING, _OUTPUT, _OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
_INTEGERS = (_OFFSETS, "t2d")
_OVERLAP = 2  # of blocks: how many hold each token


def check_head(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Refuse a head that cannot be trained further for this target."""
    if recipe.start is None:
        raise DistillError(
            "kind: a dflash head is trained further, not from nothing: name the folder of a head "
            "made for this target with --start, or make an eagle3 head or a draft"
        )
    module = BlockModule(Path(recipe.start), config)
    if recipe.row_tokens <= 2 * module.size:
        raise DistillError(
            f"row_tokens is {recipe.row_tokens}; it must be more than two blocks of {module.size}"
        )


class BlockModule(HeadModule):
    """Its parameters are named as in the saved file. Embedding and output layer are not trained,
    whether they are the target's or its own.
    """

    def __init__(self, folder: Path, target: PreTrainedConfig) -> None:
        """The shape of the head in a folder; `begin` fills it. Raises DistillError if it cannot be
        trained for a target of this config.
        """
        super().__init__()
        of_text = target.get_text_config()
        self._folder = folder
        with _named(folder):
            if (kind := head_kind(folder)) not in TRAINED_KINDS:
                found = "no head" if kind is None else f"a head of kind {kind}"
                raise HeadError(
                    f"it holds {found}; {', '.join(TRAINED_KINDS)} heads are trained further"
                )
            config = HeadConfig.load(folder)
            assert config.block is not None
            config.check_vocabulary(of_text.vocab_size)
            check_mask_token(config.block.mask_token_id, of_text.vocab_size)
            self.boundaries = config.boundaries_of(of_text.num_hidden_layers)
            if self.boundaries[-1] == of_text.num_hidden_layers:
                raise HeadError(
                    "it reads the states behind the target's last layer, which transformers has "
                    "only behind the last norm"
                )
        block, self._layers = config.block, config.layers
        self.size = block.size
        self._block = block
        self._num_leading = 0 if block.predicts_from_anchor else 1  # rows that draft nothing
        self.num_drafts = block.size - self._num_leading
        self.stride = max(1, block.size // _OVERLAP)
        self.decay = math.exp(-1 / (1 + 3 / 8 * block.size))
        stored = {n: each.shape for n, each in stored_head(folder, integers=_INTEGERS).items()}
        with torch.device("meta"):
            self._make(config, of_text.hidden_size, stored)
        self._check_shapes(config, of_text.hidden_size, stored)
        self._ids: Tensor | None = None
        maps = tensors_of(folder, names=_INTEGERS)
        if _OFFSETS in maps:
            most = of_text.vocab_size
            with _named(folder):
                self._ids = ids_of_target(config, maps[_OFFSETS], maps.get("t2d"), most)

    def _make(
        self, config: HeadConfig, target_width: int, stored: dict[str, tuple[int, ...]]
    ) -> None:
        layers = config.layers
        width, eps = layers.hidden_size, layers.rms_norm_eps
        self.fc = nn.Linear(len(self.boundaries) * target_width, width, bias=False)
        self.hidden_norm, self.norm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.layers = nn.ModuleList()
        for i in range(layers.num_hidden_layers):
            layer: Any = LlamaDecoderLayer(layers, i)
            if f"layers.{i}.self_attn.q_norm.weight" in stored:
                layer.self_attn.q_norm = LlamaRMSNorm(layers.head_dim, eps)
                layer.self_attn.k_norm = LlamaRMSNorm(layers.head_dim, eps)
            if self._block.convolution is not None:
                layer.attention_conv = Convolution(width, *self._block.convolution)
                layer.mlp_conv = Convolution(width, *self._block.convolution)
            self.layers.append(layer)
        rank = 0
        if self._block.has_markov:
            rank = (stored.get("markov_head.markov_w1.weight") or (0,))[-1]
            self.markov_head = Markov(layers.vocab_size, rank, config.draft_vocab_size)
        if self._block.selector is not None:
            self.candidate_selector = SelectorModule(
                layers.vocab_size, width, *self._block.selector
            )
        name = "confidence_head.proj"
        self._has_confidence = self._block.has_confidence and f"{name}.weight" in stored
        if self._has_confidence:
            if stored[f"{name}.weight"] == (1, width):
                rank = 0
            self.confidence_head = Confidence(width, rank, bias=f"{name}.bias" in stored)

    def _check_shapes(
        self, config: HeadConfig, target_width: int, stored: dict[str, tuple[int, ...]]
    ) -> None:
        """Refuse files whose tensors are not those of the config, or of this target."""
        width, vocab = config.layers.hidden_size, config.layers.vocab_size
        size = config.draft_vocab_size
        meant = {name: tuple(t.shape) for name, t in self.state_dict().items()}
        own: dict[str, tuple[int, ...]] = {_EMBEDDING: (vocab, width), _OUTPUT: (size, width)}
        own |= {_OFFSETS: (size,), "t2d": (vocab,)}
        needed = {_EMBEDDING, _OUTPUT} if width != target_width else set[str]()
        if size != vocab:
            needed |= {_OUTPUT, _OFFSETS}
        meant |= {name: shape for name, shape in own.items() if name in needed | stored.keys()}
        # First what shows a head of another target.
        for name in sorted(meant.keys() | stored.keys(), key=lambda name: (name != _FC, name)):
            if meant.get(name) != stored.get(name):
                found, must = (
                    " x ".join(map(str, of[name])) if name in of else "not there"
                    for of in (stored, meant)
                )
                raise DistillError(
                    f"start: the head in {self._folder} does not fit its config and this target: "
                    f"{name} is {found}, and must be {must}"
                )

    def begin(self, target: PreTrainedModel) -> None:
        """Take the numbers of the head in the folder."""
        found = tensors_of(self._folder)
        self.take_over(target, self._ids)
        embedding, output = self._of_target
        own = {n: found[n].to(output) for n in (_EMBEDDING, _OUTPUT) if n in found}
        self._of_target = (own.get(_EMBEDDING, embedding), own.get(_OUTPUT, output))
        state = {name: found[name].float().to(self.device) for name in self.state_dict()}
        self.load_state_dict(state, assign=True)
        self.requires_grad_(True)
        self._rotary = (LlamaRotaryEmbedding(self._layers).to(self.device),)

    def forward(
        self, states: Tensor, next_ids: Tensor, mask: Tensor, num_drafts: int, rows: slice
    ) -> list[Drafted]:
        c = self.hidden_norm(self.fc(states.flatten(2).float()))
        length, num_rows = states.shape[1], num_drafts + self._num_leading
        behind = torch.arange(length, device=self.device)[rows]  # [A]
        block = next_ids[:, behind, None].repeat(1, 1, num_rows).long()
        block[..., 1:] = self._block.mask_token_id
        x = F.embedding(block.flatten(1), self._of_target[0]).float() * self._block.embedding_scale
        within = torch.arange(num_rows, device=self.device)
        positions = (behind[:, None] + 1 + within).flatten()
        rotary = self._rotary[0](c, torch.arange(length + num_rows, device=self.device)[None])
        places = torch.cat((torch.arange(length, device=self.device), positions))
        cos, sin = (each[:, None, places] for each in rotary)
        of_block = torch.arange(len(behind), device=self.device).repeat_interleave(num_rows)
        own = (of_block[:, None] == of_block).expand(len(mask), 1, -1, -1)
        seen = torch.cat((mask[:, :, rows].repeat_interleave(num_rows, 2), own), -1)
        ahead = places - positions[:, None]
        for i, layer in enumerate(self.layers):
            of_layer: Any = layer
            is_open = seen & self._open(i, ahead)
            attend = partial(self._attention, of_layer.self_attn, c, cos, sin, is_open)
            n = of_layer.input_layernorm(x)
            x = x + getattr(of_layer, "attention_conv", _alone)(n, num_rows, attend)
            n = of_layer.post_attention_layernorm(x)
            x = x + getattr(of_layer, "mlp_conv", _alone)(n, num_rows, of_layer.mlp)
        h = self.norm(x).unflatten(1, (-1, num_rows))[:, :, self._num_leading :]
        previous = next_ids[:, behind[:, None] + torch.arange(num_drafts, device=self.device)]
        return self._drafted(h, previous.long())

    def _open(self, i: int, ahead: Tensor) -> Tensor:
        """Which keys a row of layer i may see, so far ahead of it. Shape: [T, L + T]."""
        window, is_causal = window_of(self._layers, i), self._block.is_causal
        is_open = torch.ones_like(ahead, dtype=torch.bool)
        if window is not None:
            is_open &= ahead > -window
        if is_causal or (is_causal is None and window is not None):
            is_open &= ahead <= 0
        return is_open

    def _attention(
        self, part: Any, c: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, z: Tensor
    ) -> Tensor:
        """Of the blocks' rows over the context and themselves. Shape: z [B, T, hidden]."""
        both = torch.cat((c, z), 1)

        def heads(of: Tensor, name: str) -> Tensor:
            made: Tensor = getattr(part, f"{name}_proj")(of)
            made = made.unflatten(-1, (-1, part.head_dim))
            norm = getattr(part, f"{name}_norm", None)
            return (made if norm is None else norm(made)).transpose(1, 2)

        query, key, value = heads(z, "q"), heads(both, "k"), heads(both, "v")
        num_rows, group = z.shape[1], part.num_key_value_groups
        query = query * cos[..., -num_rows:, :] + rotate_half(query) * sin[..., -num_rows:, :]
        key = key * cos + rotate_half(key) * sin
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        out = F.scaled_dot_product_attention(query, key, value.to(key), seen, scale=part.scaling)
        mixed: Tensor = part.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def _drafted(self, h: Tensor, previous: Tensor) -> list[Drafted]:
        """Shape: h [B, A, k, hidden], previous [B, A, k]."""
        output = self._of_target[1]
        logits = F.linear(h.to(output.dtype), output)
        if self._block.logit_scale != 1.0:
            logits = logits * self._block.logit_scale
        if (cap := self._block.softcap) is not None:
            logits = cap * (logits / cap).tanh()
        before = confidence = of_previous = None
        if self._block.has_markov:
            logits = self.markov_head(h, logits, previous)
            of_previous = self.markov_head.markov_w1(previous)
        if self._block.selector is not None:
            before, logits = logits, self.candidate_selector(h, logits, previous)
        if self._has_confidence:
            confidence = self.confidence_head(h, of_previous)
        each = (_by_draft(part, previous.shape[2]) for part in (logits, before, confidence))
        return [Drafted(*of_draft) for of_draft in zip(*each, strict=True)]

    def export(self, target: PreTrainedModel, folder: Path) -> None:
        """Save it under the config that it had; what is not trained stays as it was."""
        kept = tensors_of(self._folder, names=(_EMBEDDING, _OUTPUT, *_INTEGERS))
        write_head(folder, kept | dict(self.state_dict()), config_to_keep(self._folder))


def _alone(n: Tensor, _num_rows: int, part: Callable[[Tensor], Tensor]) -> Tensor:
    """In place of a convolution, where a layer has none."""
    return part(n)


def _by_draft(part: Tensor | None, num_drafts: int) -> Sequence[Tensor | None]:
    return [None] * num_drafts if part is None else part.unbind(2)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Name the folder in errors."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise DistillError(f"start: {folder} cannot be trained: {error}") from None


def begun(target: PreTrainedModel, folder: Path) -> BlockModule:
    """The head in a folder, ready to be trained further."""
    module = BlockModule(folder, target.config)
    module.begin(target)
    return module

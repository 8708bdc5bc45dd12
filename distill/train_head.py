"""The head learns the target's distributions, each draft after those that it recycles."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.host_memory import available_bytes

from .dflash import BlockModule, begun
from .divergence import mean_divergence
from .eagle3 import default_boundaries, new_head
from .head import Drafted, HeadModule, states_of
from .lessons import Lessons
from .mtp import MtpModule
from .recipe import DistillError, Divergence, Recipe
from .train import HeldOut, Trainer, mask_of

_STATES_SHARE = 0.5  # of the free memory, for the target's states
_NOWHERE = -30.0  # a log probability and a logit that count for nothing


def kept_states(recipe: Recipe, target: PreTrainedModel, num_tokens: int) -> tuple[int, ...]:
    """All boundaries, if the device has room for their states of so many tokens; none otherwise.

    With a small target, training is fast only if these states are computed just once. A hybrid must
    keep them: conversations in one row would share its state. Raises DistillError if it cannot.
    """
    if recipe.kind == "draft":
        return ()
    of_text = target.config.get_text_config()
    boundaries = _boundaries(recipe, target)
    num_bytes = num_tokens * len(boundaries) * of_text.hidden_size * target.dtype.itemsize
    room = _room(target.device) * _STATES_SHARE
    if num_bytes < room:
        return boundaries
    if "linear_attention" in (getattr(of_text, "layer_types", None) or ()):
        raise DistillError(
            f"the target's states of {num_tokens} tokens take {num_bytes / 1e9:.1f} GB, and there "
            f"is room for {room / 1e9:.1f}; give a smaller budget"
        )
    return ()


def _boundaries(recipe: Recipe, target: PreTrainedModel) -> tuple[int, ...]:
    """Those of the target that the recipe's head reads."""
    num_layers = target.config.get_text_config().num_hidden_layers
    if recipe.kind == "mtp":
        return (num_layers,)
    if recipe.kind == "dflash":
        return BlockModule(_folder(recipe), target.config).boundaries
    return default_boundaries(num_layers)


def _folder(recipe: Recipe) -> Path:
    """Where the head is that training begins with."""
    return Path(recipe.start or recipe.target)


def _room(device: torch.device) -> int:
    """Free memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


class HeadTrainer(Trainer):
    """A head in training. If the lessons have no states, the target reads each batch again."""

    draft: HeadModule

    def __init__(self, recipe: Recipe, target: PreTrainedModel, token_ids: Tensor) -> None:
        """Shape: token_ids [T], the target's text, whose most frequent tokens a new head drafts."""
        draft: HeadModule
        if recipe.kind == "eagle3":
            draft = new_head(target, recipe, token_ids)
        else:
            draft = (MtpModule if recipe.kind == "mtp" else begun)(target, _folder(recipe))
        super().__init__(recipe, draft, target.dtype)
        self._target = target
        self._num_drafts = draft.num_drafts or recipe.head_steps
        ids = self.draft.get_buffer("target_ids")
        vocab_size = target.get_input_embeddings().get_parameter("weight").shape[0]
        # [V] place of each token among the drafted ones; their number for all other tokens
        self._place = torch.full((vocab_size,), len(ids), device=ids.device)
        self._place[ids] = torch.arange(len(ids), device=ids.device)

    def _backward(
        self, lessons: Lessons, rows: Tensor, divergence: Divergence, weight: float
    ) -> Tensor:
        token_ids, owner = lessons.token_ids[rows], lessons.conversation_of[rows]
        states = None if lessons.states is None else lessons.states[rows]
        # Other rows in each step, and the same after a break.
        first = np.random.default_rng([self.recipe.seed, self.step]).integers(self.draft.stride)
        drafting = slice(int(first), rows.shape[1] - self._num_drafts, self.draft.stride)
        drafts = self._drafts(token_ids, mask_of(owner), states, drafting)
        behind = torch.arange(rows.shape[1], device=self.device)[drafting]
        decay = self.draft.decay
        share = weight / sum(decay**i for i in range(len(drafts)))
        loss = torch.zeros((), device=self.device)
        for i, drafted in enumerate(drafts):
            at = behind + i + 1
            # Not of the conversation that starts in between, nor of what users type.
            is_taught = (owner[:, at] == owner[:, behind]) & lessons.is_answered[rows[:, at]]
            positions = rows[:, at][is_taught]
            top_ids, top_log_probs = self._drafted(
                lessons.top_ids[positions], lessons.top_log_probs[positions]
            )
            for logits in (drafted.logits, drafted.before):
                if logits is not None:
                    taught = F.pad(logits[is_taught], (0, 1), value=_NOWHERE)
                    its = mean_divergence(divergence, top_ids, top_log_probs, taught, share)
                    loss = loss + its
            if drafted.confidence is not None:
                taught = drafted.logits[is_taught].detach()
                chance = self._chance(lessons, positions, taught)
                said = drafted.confidence[is_taught].float()
                its = F.binary_cross_entropy_with_logits(said, chance, reduction="sum")
                loss = loss + its * share / max(1, len(said))
            share *= decay
        loss.backward()
        return loss.detach()

    def _drafts(
        self, token_ids: Tensor, mask: Tensor | None, states: Tensor | None, drafting: slice
    ) -> Sequence[Drafted]:
        """Each draft behind these rows, which are followed by enough tokens.

        Shape: token_ids [B, L], mask [B, 1, L, L], states [B, L, m, hidden]; None: computed here.
        """
        length = token_ids.shape[1] - self._num_drafts
        if states is None:
            states = states_of(self._target, token_ids, mask, self.draft.boundaries)
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=self.device).tril()
        enabled = self._dtype != torch.float32
        with torch.autocast(self.device.type, self._dtype, enabled=enabled):
            drafts: list[Drafted] = self.draft(
                states[:, :length],
                token_ids[:, 1:],
                mask[..., :length, :length],
                self._num_drafts,
                drafting,
            )
        return drafts

    def _drafted(self, top_ids: Tensor, top_log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distribution over the drafted tokens alone, scaled up to sum to 1.

        All tokens beyond the likeliest count as drafted. Shape: [N, K] each.
        """
        place = self._place[top_ids.long()]
        p = top_log_probs.float().exp()
        is_drafted = place < len(self.draft.get_buffer("target_ids"))
        rest = (1 - p.sum(-1, keepdim=True)).clamp_min(1e-6)
        mass = (p * is_drafted).sum(-1, keepdim=True) + rest
        return place, torch.where(is_drafted, (p / mass).log(), _NOWHERE)

    def _chance(self, lessons: Lessons, at: Tensor, logits: Tensor) -> Tensor:
        """That a draft drawn from them is accepted, at least. Shape: [N], [N, V'] -> [N]."""
        place = self._place[lessons.top_ids[at].long()]
        q = F.pad(logits.float().softmax(-1), (0, 1)).gather(1, place)
        return torch.minimum(lessons.top_log_probs[at].float().exp(), q).sum(-1)

    @torch.no_grad()
    def evaluate(self, lessons: Lessons) -> HeldOut:
        """Agreement of each draft after the target's own tokens, conversation by conversation."""
        num_drafts, ids = self._num_drafts, self.draft.get_buffer("target_ids")
        sums = torch.zeros(num_drafts, 3, device=self.device)
        of_each = zip(lessons.starts_np, lessons.lengths_np, strict=True)
        for (start, length), first in itertools.product(of_each, range(self.draft.stride)):
            if length <= num_drafts + first:
                continue
            part = slice(start, start + length)
            drafting = slice(first, length - num_drafts, self.draft.stride)
            behind = torch.arange(start, start + length, device=self.device)[drafting]
            states = None if lessons.states is None else lessons.states[None, part]
            drafts = self._drafts(lessons.token_ids[None, part], None, states, drafting)
            for i, (logits, *_) in enumerate(drafts):
                at = behind + i + 1
                is_taught = lessons.is_answered[at]
                at, taught = at[is_taught], logits[0][is_taught]
                first_choice = lessons.top_ids[at, 0].long()
                sums[i, 0] += (ids[taught.argmax(-1)] == first_choice).sum()
                sums[i, 1] += self._chance(lessons, at, taught).sum()
                sums[i, 2] += len(at)
        first_draft, *later = (sums[:, :2] / sums[:, 2:].clamp_min(1)).tolist()
        num_tokens = int(sums[0, 2])
        return HeldOut(first_draft[0], first_draft[1], num_tokens, tuple((g, s) for g, s in later))

    def save_model(self, folder: Path) -> None:
        self.draft.export(self._target, folder)

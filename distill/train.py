"""The draft learns the target's distributions."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from .divergence import agreement, mean_divergence
from .lessons import Lessons
from .recipe import Divergence, Recipe
from .rows import TrainingRows
from .whole_file import whole_file

_WARMUP_STEPS = 50
_LAST_LEARNING_RATE = 0.02  # relative to the first
_MAX_GRADIENT_NORM = 1.0
_CHECKPOINT_INTERVAL_S = 60.0
# Parts of the names of matrices whose rows are of tokens, or that have one row.
_TABLES = ("embed", "lm_head", "codebook", "markov", "confidence")
_MAX_SHARD_SIZE = "15MB"
_UNTIMED_STEPS, _TIMED_STEPS = 2, 5  # the first steps allocate memory


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Results on text that was not trained on, with the target's own text before each token."""

    greedy_agreement: float  # the draft's first choice is the target's
    sampled_acceptance: float  # a token drawn from the draft at temperature 1 is accepted
    num_tokens: int
    # For a head, both again for each draft after the first, following the target's own tokens.
    later: tuple[tuple[float, float], ...] = ()


class Trainer:
    """A draft in training; with several replicas, each brings its own rows to every step."""

    def __init__(self, recipe: Recipe, draft: nn.Module, dtype: torch.dtype) -> None:
        self.recipe = recipe
        self.draft = draft
        self.device: torch.device = draft.device  # type: ignore[assignment]
        self.step = 0
        self._dtype = dtype  # for computing; the weights themselves are float32
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._optimizers = _optimizers(draft, recipe.learning_rate)

    def train_step(self, lessons: Lessons, rows: Tensor, progress: float) -> Tensor:
        """One step on rows [B, L] of the lessons; `progress` in [0, 1) sets the rate.

        Returns the mean loss, on the device.
        """
        recipe = self.recipe
        rate = recipe.learning_rate * _rate_at(self.step, progress)
        is_last = progress >= 1 - recipe.last_share
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = torch.zeros((), device=self.device)
        for micro in rows.to(self.device).split(recipe.micro_batch_rows):
            divergence = recipe.last_divergence if is_last else recipe.divergence
            loss += self._backward(lessons, micro, divergence, len(micro) / len(rows) / self._world)
        if self._world > 1:
            for parameter in self.draft.parameters():
                dist.all_reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), _MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss

    def _backward(
        self, lessons: Lessons, rows: Tensor, divergence: Divergence, weight: float
    ) -> Tensor:
        """Add the gradient of these rows' loss, [B, L], times `weight`; returns the loss."""
        answered = lessons.is_answered[rows].nonzero(as_tuple=True)
        positions = rows[answered]
        part = mean_divergence(
            divergence,
            lessons.top_ids[positions],
            lessons.top_log_probs[positions],
            self._logits(lessons.token_ids[rows], answered, mask_of(lessons.conversation_of[rows])),
            weight,
        )
        part.backward()
        return part.detach()

    def _logits(
        self, token_ids: Tensor, at: tuple[Tensor, ...], mask: Tensor | None = None
    ) -> Tensor:
        """The draft's logits [N, V] at N places of [B, L] tokens.

        Without a mask each row is one conversation.
        """
        draft: Any = self.draft
        enabled = self._dtype != torch.float32
        with torch.autocast(self.device.type, self._dtype, enabled=enabled):
            states = draft.get_decoder()(
                token_ids.long(), attention_mask=mask, use_cache=False
            ).last_hidden_state
            logits: Tensor = draft.get_output_embeddings()(states[at])
        return logits

    @torch.no_grad()
    def evaluate(self, lessons: Lessons) -> HeldOut:
        """Agreement, conversation by conversation."""
        same = torch.zeros((), dtype=torch.int64, device=self.device)
        overlap = torch.zeros((), device=self.device)
        for start, length in zip(lessons.starts_np, lessons.lengths_np, strict=True):
            part = slice(start, start + length)
            answered = lessons.is_answered[None, part].nonzero(as_tuple=True)
            at = start + answered[1]
            logits = self._logits(lessons.token_ids[None, part], answered)
            of_part = agreement(lessons.top_ids[at], lessons.top_log_probs[at], logits)
            same += of_part[0]
            overlap += of_part[1]
        num_tokens = int(lessons.is_answered.sum())
        return HeldOut(
            same.item() / max(1, num_tokens), overlap.item() / max(1, num_tokens), num_tokens
        )

    def save_model(self, folder: Path) -> None:
        """Write the trained model, in bfloat16."""
        draft: Any = self.draft
        draft.bfloat16().save_pretrained(folder, max_shard_size=_MAX_SHARD_SIZE)

    def save(self, path: Path) -> None:
        """Save everything that the next step depends on, completely or not at all."""
        state = {
            "step": self.step,
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        # To a path, torch would fail without a reason.
        with whole_file(path) as scratch, scratch.open("wb") as file:
            torch.save(state, file)

    def restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = int(state["step"])


def train(
    trainer: Trainer,
    lessons: Lessons,
    rows: TrainingRows,
    rows_per_step: int,
    num_steps: int,
    checkpoint: Path | None = None,
    report: Callable[[int], None] = lambda step: None,
) -> None:
    """Train up to `num_steps`, continuing from the trainer's present step.

    `checkpoint` is written now and then, and when the user interrupts: training that continues from
    it gets the same rows at the same rates.
    """
    stream = itertools.islice(rows, trainer.step * rows_per_step, None)
    saved_s = time.monotonic()
    try:
        while trainer.step < num_steps:
            batch = torch.stack(list(itertools.islice(stream, rows_per_step)))
            trainer.train_step(lessons, batch, trainer.step / num_steps)
            report(trainer.step)
            if checkpoint and time.monotonic() - saved_s > _CHECKPOINT_INTERVAL_S:
                trainer.save(checkpoint)
                saved_s = time.monotonic()
    except KeyboardInterrupt:
        if checkpoint:
            trainer.save(checkpoint)
        raise


def time_step(trainer: Trainer, lessons: Lessons, rows: TrainingRows, rows_per_step: int) -> float:
    """Seconds that a step takes; the trainer cannot be used afterwards."""
    seconds = []
    for step in range(_UNTIMED_STEPS + _TIMED_STEPS):
        start_s = time.perf_counter()
        train(trainer, lessons, rows, rows_per_step, step + 1)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[_UNTIMED_STEPS:])


def mask_of(conversation_of: Tensor) -> Tensor:
    """What each position may attend to: its own conversation so far. [B, L] -> [B, 1, L, L]."""
    same = conversation_of[:, None, :, None] == conversation_of[:, None, None, :]
    return same.tril()


def _rate_at(step: int, progress: float) -> float:
    """Factor of the learning rate: a linear rise, then half a cosine down."""
    falling = (1 + math.cos(math.pi * progress)) / 2
    falling = _LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * falling
    return min((step + 1) / _WARMUP_STEPS, falling)


def _optimizers(draft: nn.Module, learning_rate: float) -> list[Optimizer]:
    """Muon for the layers' matrices; AdamW for tables of tokens and the norms."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in draft.named_parameters():
        is_table = any(table in name for table in _TABLES)
        (matrices if parameter.ndim == 2 and not is_table else rest).append(parameter)
    muon = Muon(matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)]

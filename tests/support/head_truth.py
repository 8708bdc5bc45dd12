"""What heads are to compute, and engines that are held to it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import PlainBlockHead
from heads import PlainHead
from mtp import PlainMtp
from tiny_models import VOCAB
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.models.heads.config import head_kind
from outrider.engine.proposers.head import HeadSource


class Truth:
    """What a head is to compute, by the formulas and transformers' hidden states."""

    def __init__(self, target: Path, head: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        embedding = self.model.get_input_embeddings().weight.detach()
        self.head: PlainHead | PlainBlockHead | PlainMtp
        if head == target:
            self.head = PlainMtp(target)
        elif head_kind(head) in ("eagle3", "peagle"):
            self.head = PlainHead(head, embedding)
        else:
            self.head = PlainBlockHead(head, embedding, self.model.lm_head.weight.detach())
        self.boundaries = self.head.boundaries

    @torch.inference_mode()
    def states(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """[T, m, H] of each; the last boundary is in front of the last norm."""
        before_norm = []
        hook = self.model.model.norm.register_forward_pre_hook(
            lambda _, args: before_norm.append(args[0])
        )
        # No token sees the padding behind it.
        padded = pad_sequence([torch.tensor(token_ids) for token_ids in sequences], True)
        states = self.model(padded, output_hidden_states=True).hidden_states
        hook.remove()
        every = [*states[:-1], before_norm[0], states[-1]]
        together = torch.stack([every[b] for b in self.boundaries], 2)
        return [rows[: len(ids)] for rows, ids in zip(together, sequences, strict=True)]

    def draft_logits(
        self, sequences: list[list[int]], drafts: list[list[int]]
    ) -> list[torch.Tensor]:
        return [
            self.head.draft_logits(states, *each, VOCAB)
            for states, *each in zip(self.states(sequences), sequences, drafts, strict=True)
        ]


def source_of(engine: Engine) -> HeadSource:
    source = engine.worker.proposer.sources[-1]
    assert isinstance(source, HeadSource)
    return source


def check_drafts(engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on hold what every draft is drawn from to the formulas; returns k_i of each."""
    proposer, distributions = engine.worker.proposer, source_of(engine).draws.distributions
    propose = proposer.propose  # what a source raises would be taken for a failure to draft
    checked: list[int] = []

    def checking(plan: Any) -> list[int]:
        counts = propose(plan)
        slots = engine.worker.slots
        got, sequences, drafts = [], [], []
        for scheduled, k in zip(plan.scheduled, counts, strict=True):
            if not scheduled.emits:
                continue
            slot = scheduled.slot
            checked.append(k)
            if k == 0:
                continue
            n = int(slots.num_tokens[slot])  # of which the host may not have read the last ones
            token_ids = slots.token_ids[slot].tolist()
            got.append(distributions.logits[slot, :k].cpu())
            sequences.append(token_ids[:n])
            drafts.append(token_ids[n : n + k])
        if got:
            expected = truth.draft_logits(sequences, drafts)
            torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
        return counts

    monkeypatch.setattr(proposer, "propose", checking)
    return checked


# So warm that about every number of drafts is accepted in some step.
SAMPLED = SamplingParams(max_tokens=40, temperature=2.0, seed=5, verification="token")

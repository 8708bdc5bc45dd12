"""What heads that draft in blocks do beyond their formulas: doubt, rank and select."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import PlainBlockHead, save_tiny_block_head
from engines import engine_config, prompts, run, tokens
from head_truth import SAMPLED, Truth, source_of
from tiny_models import VOCAB, Tiny

from outrider.engine.engine import Engine
from outrider.engine.models.heads.chain import Selector
from outrider.engine.models.weights import Dense, Linear
from outrider.engine.proposers import draws
from outrider.engine.proposers.block import BlockByBlock

K = 3


@pytest.fixture
def target(tiny_model: Tiny) -> Path:
    return tiny_model("llama", num_hidden_layers=6)


@pytest.mark.parametrize("confidence", ["states", "token"])
def test_drafts_that_the_confidence_head_doubts_are_not_made(
    confidence: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is made while the chance that all are accepted is large enough, as the head says."""
    path = save_tiny_block_head(tmp_path, target, markov="vanilla", confidence=confidence)
    engine, truth = Engine(engine_config(target, path, k=K)), Truth(target, path)
    proposer, source, slots = engine.worker.proposer, source_of(engine), engine.worker.slots
    assert isinstance(source._drafter, BlockByBlock)
    assert isinstance(truth.head, PlainBlockHead)
    plain, propose, cut = truth.head, proposer.propose, []
    source.draws.stops_early = True  # a GPU would not look at them
    engine.scheduler.drafting.least_chance = 0.3

    def checking(plan: Any) -> list[int]:
        n = [int(slots.num_tokens[s.slot]) for s in plan.scheduled]
        counts = propose(plan)
        for scheduled, num_drafts, known in zip(plan.scheduled, counts, n, strict=True):
            k = scheduled.max_drafts
            if k == 0 or scheduled.start != -1 or not scheduled.memory.head_reads_along:
                continue
            ids = slots.token_ids[scheduled.slot].tolist()
            tokens, drafts = ids[:known], ids[known : known + k]
            (states,) = truth.states([tokens])
            chance = plain.confidence(states, tokens, drafts).cumprod(0)
            assert num_drafts == int((chance >= 0.3).sum())
            cut.append(num_drafts < k)
        return counts

    monkeypatch.setattr(proposer, "propose", checking)
    run(engine, prompts([21, 3, 9], VOCAB), SAMPLED)
    assert True in cut
    assert False in cut


def test_drafts_are_ranked_by_what_the_confidence_head_says(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: its log odds are kept, in place of those of the distributions."""
    monkeypatch.setattr(draws, "stops_early_on", lambda device: False)
    path = save_tiny_block_head(tmp_path, target, markov="vanilla", confidence="token")
    engine, truth = Engine(engine_config(target, path, k=K)), Truth(target, path)
    proposer, slots = engine.worker.proposer, engine.worker.slots
    propose, num_seen = proposer.propose, 0
    plain = truth.head
    assert isinstance(plain, PlainBlockHead)

    def checking(plan: Any) -> list[int]:
        nonlocal num_seen
        n = [int(slots.num_tokens[s.slot]) for s in plan.scheduled]
        counts = propose(plan)
        for scheduled, k, known in zip(plan.scheduled, counts, n, strict=True):
            ids = slots.token_ids[scheduled.slot].tolist()
            tokens, drafts = ids[:known], ids[known : known + k]
            if k > 0:
                (states,) = truth.states([tokens])
                expected = torch.logit(plain.confidence(states, tokens, drafts)[:k].float())
                assert proposer.draws is not None
                assert proposer.draws.log_odds is not None
                got = proposer.draws.log_odds[scheduled.slot, :k].cpu()
                torch.testing.assert_close(got, expected.cpu(), rtol=1e-3, atol=1e-3)
                num_seen += k
        return counts

    monkeypatch.setattr(proposer, "propose", checking)
    run(engine, prompts([21, 3, 9], VOCAB), SAMPLED)
    assert num_seen > 20


def test_rows_of_the_vocabulary_without_a_token_are_no_candidates() -> None:
    codebook, matrix = torch.ones(9, 2), Linear(Dense(torch.ones(2, 3)), None)
    selector = Selector(codebook, codebook, matrix, top_k=4)
    logits = torch.arange(9.0).expand(2, 1, 9)  # of which the last three have no token
    prepared = selector.prepared(torch.ones(2, 1, 3), logits, vocab_size=6)
    scores = selector(torch.tensor([5]), *(each[0] for each in prepared))
    # 1 * 3 * 1 of either factor.
    assert scores.tolist() == [[-torch.inf] * 2 + [8, 9, 10, 11] + [-torch.inf] * 3]


def test_a_blocks_drafts_do_not_hang_on_how_many_a_neighbour_has(
    target: Path, tmp_path: Path
) -> None:
    engine = Engine(engine_config(target, save_tiny_block_head(tmp_path, target), k=4))
    mixed = prompts([9, 12, 15], VOCAB)
    short = replace(SAMPLED, num_speculative_tokens=2)
    alone = run(engine, mixed[:1], short)[0]
    beside = run(engine, mixed, [short, SAMPLED, replace(SAMPLED, num_speculative_tokens=1)])[0]
    assert tokens(alone) == tokens(beside)

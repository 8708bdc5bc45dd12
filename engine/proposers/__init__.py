"""The proposers, by name. To add one, write its file and enter it here."""

from ..config import EngineConfig
from ..logit_edits import LogitEdits
from ..models.heads.block_head import BlockHead
from ..models.heads.eagle3 import Eagle3Head
from ..models.heads.head import AutoregressiveHead
from ..models.pair import ModelPair
from ..state.slots import Slots
from .autoregressive import AutoregressiveProposer
from .base import Proposer
from .block import BlockProposer, ParallelEagleProposer
from .ngram import NgramProposer
from .top1 import Top1Proposer

__all__ = ["Proposer", "build_proposer"]


def build_proposer(
    config: EngineConfig, slots: Slots, edits: LogitEdits, pair: ModelPair
) -> Proposer:
    """The configured proposer; raises ValueError naming the known ones."""
    if slots.max_drafts == 0:
        return Proposer()
    name = config.speculation.proposer
    if name == "ngram":
        return NgramProposer(config.speculation, slots)
    if name != "draft_model":
        raise ValueError(f"unknown proposer {name!r}; known: draft_model, ngram, none")
    head = pair.head
    others = pair.target, slots, edits
    if isinstance(head, BlockHead):
        return BlockProposer(head, *others)
    if isinstance(head, Eagle3Head) and head.mask is not None:
        return ParallelEagleProposer(head, *others)
    if isinstance(head, AutoregressiveHead):
        return AutoregressiveProposer(head, *others)
    if pair.draft is None:
        raise ValueError(
            "the draft_model proposer needs a draft; name one, or choose another proposer"
        )
    return Top1Proposer(pair.draft, slots, edits, config.scheduler.max_num_batched_tokens)

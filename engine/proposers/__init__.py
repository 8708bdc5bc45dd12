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
    name: str, config: EngineConfig, slots: Slots, edits: LogitEdits, pair: ModelPair
) -> Proposer:
    """The proposer of that name; raises ValueError naming the known ones."""
    match name:
        case "draft_model":
            return _of_draft(config, slots, edits, pair)
        case "ngram":
            return NgramProposer(config.speculation, slots)
        case "none":
            return Proposer()
    raise ValueError(f"unknown proposer {name!r}; known: draft_model, ngram, none")


def _of_draft(config: EngineConfig, slots: Slots, edits: LogitEdits, pair: ModelPair) -> Proposer:
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

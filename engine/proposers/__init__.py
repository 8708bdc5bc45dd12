"""The proposers, by name. To add one, write its file and enter it here."""

from collections.abc import Callable

from ..config import EngineConfig
from ..logit_edits import LogitEdits
from ..models.block_head import BlockHead
from ..models.eagle3 import Eagle3Head
from ..models.head import AutoregressiveHead
from ..models.pair import ModelPair
from ..state.slots import Slots
from .autoregressive import AutoregressiveProposer
from .base import NoProposer, Proposer
from .block import BlockProposer, ParallelEagleProposer
from .ngram import NgramProposer
from .top1 import Top1Proposer

__all__ = ["PROPOSERS", "Proposer", "build_proposer"]

Factory = Callable[[EngineConfig, Slots, LogitEdits, ModelPair], Proposer]


def _draft_model(
    config: EngineConfig, slots: Slots, edits: LogitEdits, pair: ModelPair
) -> Proposer:
    head = pair.head
    others = pair.target, slots, edits, pair.vocab_size
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
    return Top1Proposer(
        pair.draft,
        slots,
        edits,
        pair.vocab_size,
        config.scheduler.max_num_batched_tokens,
    )


PROPOSERS: dict[str, Factory] = {
    "draft_model": _draft_model,
    "ngram": lambda config, slots, edits, pair: NgramProposer(config.speculation, slots),
    "none": lambda config, slots, edits, pair: NoProposer(),
}


def build_proposer(
    name: str, config: EngineConfig, slots: Slots, edits: LogitEdits, pair: ModelPair
) -> Proposer:
    """The proposer of that name; raises ValueError naming the known ones."""
    if name not in PROPOSERS:
        raise ValueError(f"unknown proposer {name!r}; known: {', '.join(sorted(PROPOSERS))}")
    return PROPOSERS[name](config, slots, edits, pair)

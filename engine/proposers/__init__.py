"""Proposers by name. To add one: write its file, and enter it here."""

from collections.abc import Callable

from outrider.engine.config import EngineConfig
from outrider.engine.pair import ModelPair
from outrider.engine.proposers.base import NoProposer, Proposals, Proposer
from outrider.engine.proposers.ngram import NgramProposer
from outrider.engine.proposers.top1 import Top1Proposer
from outrider.engine.slots import Slots

__all__ = ["PROPOSERS", "Proposals", "Proposer", "build_proposer"]

Factory = Callable[[EngineConfig, Slots, ModelPair], Proposer]


def _draft_model(config: EngineConfig, slots: Slots, pair: ModelPair) -> Proposer:
    if pair.draft is None:
        raise ValueError(
            "the draft_model proposer needs a draft; name one, or choose another proposer"
        )
    return Top1Proposer(
        pair.draft,
        slots,
        pair.vocab_size,
        config.scheduler.max_num_batched_tokens,
        stops_early=config.speculation.adaptive and slots.device.type == "cpu",
    )


PROPOSERS: dict[str, Factory] = {
    "draft_model": _draft_model,
    "ngram": lambda config, slots, pair: NgramProposer(config.speculation, slots),
    "none": lambda config, slots, pair: NoProposer(),
}


def build_proposer(name: str, config: EngineConfig, slots: Slots, pair: ModelPair) -> Proposer:
    """The proposer of that name; raises ValueError naming the known ones."""
    if name not in PROPOSERS:
        raise ValueError(f"unknown proposer {name!r}; known: {', '.join(sorted(PROPOSERS))}")
    return PROPOSERS[name](config, slots, pair)

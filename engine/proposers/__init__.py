"""The sources of drafts, by name. To add one, write its file and enter it here."""

from ..config import EngineConfig
from ..logit_edits import LogitEdits
from ..models.heads.block_head import BlockHead
from ..models.heads.eagle3 import Eagle3Head
from ..models.heads.head import AutoregressiveHead, Head
from ..models.network import Network
from ..models.pair import ModelPair
from ..request import Request
from ..state.slots import Slots
from .block import BlockByBlock, MasksAfterAnchor, MasksAfterLastRow
from .draft_model import DraftModel
from .draws import Draws
from .head import Drafter, HeadSource
from .lookup import Lookup
from .ngram import NgramLookup
from .predictions import Prediction
from .proposer import Proposer, Source
from .token_by_token import LastRows, TokenByToken

__all__ = ["Proposer", "build_proposer"]


def build_proposer(
    config: EngineConfig, slots: Slots, edits: LogitEdits, pair: ModelPair
) -> Proposer:
    """What clients predict, and then the configured source; raises ValueError naming the known
    ones.
    """
    if slots.max_drafts == 0:
        return Proposer([])

    def predicted(request: Request) -> Prediction | None:
        return Prediction(request) if request.predicted_token_ids else None

    predictions = Lookup("prediction", predicted, slots)
    return Proposer([predictions, _configured(config, slots, edits, pair)])


def _configured(config: EngineConfig, slots: Slots, edits: LogitEdits, pair: ModelPair) -> Source:
    speculation = config.speculation
    if speculation.proposer == "ngram":
        lens = speculation.ngram_min_tokens, speculation.ngram_max_tokens
        return Lookup("ngram", lambda _: NgramLookup(*lens), slots)
    if speculation.proposer != "draft_model":
        raise ValueError(
            f"unknown proposer {speculation.proposer!r}; known: draft_model, ngram, none"
        )
    if pair.head is not None:
        return _head_source(pair.head, pair.target, slots, edits)
    if pair.draft is None:
        raise ValueError(
            "the draft_model proposer needs a draft; name one, or choose another proposer"
        )
    return DraftModel(pair.draft, slots, edits, config.scheduler.max_num_batched_tokens)


def _head_source(head: Head, target: Network, slots: Slots, edits: LogitEdits) -> HeadSource:
    """A head, what it makes of the target's passes, and how it drafts then."""
    draws = Draws(slots, edits, head)
    drafter: Drafter
    if isinstance(head, BlockHead):
        blocks = MasksAfterAnchor(head, slots)
        read = blocks.read
        drafter = BlockByBlock(head, blocks, draws, slots, head.markov, head.confidence)
    else:
        assert isinstance(head, AutoregressiveHead)
        last_rows = LastRows(head, target, slots)
        read = last_rows.read
        if isinstance(head, Eagle3Head) and head.mask is not None:
            drafter = BlockByBlock(head, MasksAfterLastRow(head, last_rows), draws, slots)
        else:
            drafter = TokenByToken(head, last_rows, draws, slots)
    return HeadSource(head, target, read, drafter, draws, slots, edits)

"""The sources of drafts, by name. To add one, write its file and enter it here."""

from typing import get_args

from ..api import SourceName
from ..config import EngineConfig
from ..logit_edits import LogitEdits
from ..models.heads.block_head import BlockHead
from ..models.heads.eagle3 import Eagle3Head
from ..models.heads.head import AutoregressiveHead, Head
from ..models.network import Network
from ..models.pair import ModelPair
from ..state.slots import Slots
from .block import BlockByBlock, MasksAfterAnchor, MasksAfterLastRow
from .draft_model import DraftModel
from .draws import Draws
from .forced import ForcedTokens
from .head import Drafter, HeadSource
from .lookup import Lookup
from .predictions import Prediction
from .proposer import Proposer, Source
from .suffix import RecentAnswers, Suffixes
from .token_by_token import LastRows, TokenByToken

__all__ = ["Proposer", "build_proposer"]


def build_proposer(
    config: EngineConfig, slots: Slots, edits: LogitEdits, pair: ModelPair
) -> Proposer:
    """The configured sources; raises ValueError naming the known ones."""

    def build(name: SourceName) -> Source:
        if name == "prediction":
            return Lookup(name, Prediction.of, slots, looks_at_once=True)  # its client asks for it
        if name == "grammar":
            return ForcedTokens(config.token_table.token_bytes if config.token_table else (), slots)
        if name == "suffix":
            answers = RecentAnswers(speculation.answers_bytes)
            fewest = speculation.suffix_min_tokens
            return Lookup(
                name,
                lambda r: Suffixes(fewest, r.memory.cache_salt, answers),
                slots,
                keep_answer=answers.add,
            )
        if pair.head is not None:
            return _head_source(pair.head, pair.target, slots, edits)
        if pair.draft is not None:
            return DraftModel(pair.draft, slots, edits, config.scheduler.max_num_batched_tokens)
        raise ValueError("the source draft_model needs a draft; name one, or leave the source out")

    speculation = config.speculation
    known = get_args(SourceName)
    if unknown := [name for name in speculation.sources if name not in known]:
        raise ValueError(f"unknown source of drafts {unknown[0]!r}; known: {', '.join(known)}")
    if slots.max_drafts == 0:
        return Proposer([])
    # Those that look drafts up are asked first: the plan says for whom they draft.
    return Proposer([build(name) for name in known if name in speculation.sources])


def _head_source(head: Head, target: Network, slots: Slots, edits: LogitEdits) -> HeadSource:
    """A head, and how it drafts from what it makes of the target's passes."""
    draws = Draws(slots, edits, head)
    drafter: Drafter
    if isinstance(head, BlockHead):
        masks = MasksAfterAnchor(head, slots)
        drafter = BlockByBlock(head, masks, draws, slots)
    else:
        assert isinstance(head, AutoregressiveHead)
        last_rows = LastRows(head, target, slots)
        if isinstance(head, Eagle3Head) and head.mask is not None:
            drafter = BlockByBlock(head, MasksAfterLastRow(head, last_rows), draws, slots)
        else:
            drafter = TokenByToken(head, last_rows, draws, slots)
    return HeadSource(head, target, drafter, draws, slots, edits)

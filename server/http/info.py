"""GET /info: the pair that is served, and what was loaded."""

from dataclasses import dataclass

from fastapi import APIRouter

from outrider.engine.api import Verification

from ..api.protocol import APIResponse
from ..api.service import Service
from ..config.settings import Settings, name_of


@dataclass(frozen=True, slots=True)
class PairCard:
    """The settings of the pair, as far as the engine does not know them."""

    target: str
    draft: str | None
    is_adaptive: bool
    verification: Verification

    @staticmethod
    def of(settings: Settings) -> "PairCard":
        draft = settings.draft.model
        return PairCard(
            target=name_of(settings.target.model),
            draft=None if draft is None else name_of(draft),
            is_adaptive=settings.speculation.adaptive,
            verification=settings.speculation.verification,
        )


class ModelInfo(APIResponse):
    model: str | None  # a hub id, or the last part of a path
    dtype: str


class SpeculationInfo(APIResponse):
    proposer: str | None  # null: the target decodes plainly
    num_speculative_tokens: int  # the most drafts in a step
    adaptive: bool | None  # whether fewer are drafted if that is faster
    verification: Verification | None  # for requests that name none


class CacheInfo(APIResponse):
    num_pages: int
    page_size_tokens: int
    bytes: int


class EngineDetails(APIResponse):
    """Details that are known once the engine was ready."""

    device: str
    target: ModelInfo
    draft: ModelInfo | None
    speculation: SpeculationInfo
    cache: CacheInfo
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    load_s: float


class Info(APIResponse):
    version: str
    model: str  # the name that requests use
    state: str  # of the engine, as in /health
    chats: bool  # whether the model has a chat template
    max_logprobs: int  # the most alternatives that a request may ask for
    engine: EngineDetails | None


def add_info_route(
    router: APIRouter, service: Service, card: PairCard | None, version: str
) -> None:
    @router.get("/info")
    async def info() -> Info:
        """The pair that is served, how it is set, and what it runs on."""
        return Info(
            version=version,
            model=service.model_name,
            state=service.client.state,
            chats=service.tokenizer.chat_template is not None,
            max_logprobs=service.settings.max_logprobs,
            engine=_engine(service, card),
        )


def _engine(service: Service, card: PairCard | None) -> EngineDetails | None:
    info = service.client.info
    if info is None:
        return None
    draft = None
    if info.draft_dtype is not None:
        draft = ModelInfo(model=card.draft if card else None, dtype=info.draft_dtype)
    return EngineDetails(
        device=info.device,
        target=ModelInfo(model=card.target if card else None, dtype=info.target_dtype),
        draft=draft,
        speculation=SpeculationInfo(
            proposer=info.proposer,
            num_speculative_tokens=info.num_speculative_tokens,
            adaptive=card.is_adaptive if card else None,
            verification=card.verification if card else None,
        ),
        cache=CacheInfo(
            num_pages=info.num_pages,
            page_size_tokens=info.page_size_tokens,
            bytes=info.cache_bytes,
        ),
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        vocab_size=info.vocab_size,
        load_s=info.load_s,
    )

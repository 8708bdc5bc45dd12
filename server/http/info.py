"""GET /info: the pair that is served, and what was loaded."""

from fastapi import APIRouter

from outrider.engine.api import Verification

from ..api.protocol import APIResponse
from ..api.service import VERSION, Service
from ..config.model_names import name_of
from ..config.settings import Settings


class ModelInfo(APIResponse):
    model: str | None  # a hub id, or the last part of a path
    dtype: str


class SpeculationInfo(APIResponse):
    sources: list[str]  # of drafts, as `speculation.sources` of a request names them
    proposer: str | None  # what draws drafts, or the last source; null: the target decodes plainly
    num_speculative_tokens: int  # drafts of a model in a step, at most
    share_of_text: float  # of the target's tokens in ordinary text, those that the draft has, too
    adaptive: bool  # whether fewer are drafted if that is faster
    verification: Verification  # for requests that name none


class CacheInfo(APIResponse):
    num_pages: int
    page_size_tokens: int
    bytes: int
    host_pages: int  # in host memory, of all ranks; 0: none
    host_bytes: int


class EngineDetails(APIResponse):
    """Details that are known once the engine was ready."""

    device: str
    tensor_parallel: int  # processes that share the target, each with a device
    draft_tensor_parallel: int  # that share the draft, too
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
    max_logprobs: int  # alternatives that a request may ask for, at most
    engine: EngineDetails | None


def add_info_route(router: APIRouter, service: Service, pair: Settings) -> None:
    @router.get("/info")
    async def info() -> Info:
        """The pair that is served, how it is set, and what it runs on."""
        return Info(
            version=VERSION,
            model=service.model_name,
            state=service.client.state,
            chats=service.tokenizer.chat_template is not None,
            max_logprobs=service.settings.max_logprobs,
            engine=_engine(service, pair),
        )


def _engine(service: Service, pair: Settings) -> EngineDetails | None:
    info = service.client.info
    if info is None:
        return None
    draft = None
    if info.draft_dtype is not None:
        name = pair.draft.model
        draft = ModelInfo(model=name and name_of(name), dtype=info.draft_dtype)
    return EngineDetails(
        device=info.device,
        tensor_parallel=info.tensor_parallel,
        draft_tensor_parallel=info.draft_tensor_parallel,
        target=ModelInfo(model=name_of(pair.target.model), dtype=info.target_dtype),
        draft=draft,
        speculation=SpeculationInfo(
            sources=list(info.sources),
            proposer=info.proposer,
            num_speculative_tokens=info.num_speculative_tokens,
            share_of_text=1.0 if info.share_of_text is None else info.share_of_text,
            adaptive=pair.speculation.adaptive,
            verification=pair.speculation.verification,
        ),
        cache=CacheInfo(
            num_pages=info.num_pages,
            page_size_tokens=info.page_size_tokens,
            bytes=info.cache_bytes,
            host_pages=info.host_pages,
            host_bytes=info.host_bytes,
        ),
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        vocab_size=info.vocab_size,
        load_s=info.load_s,
    )

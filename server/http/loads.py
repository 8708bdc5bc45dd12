"""How busy the engine is, as routers ask for it."""

import datetime

from fastapi import APIRouter

from outrider.engine.processes.client import EngineClient

from ..api.protocol import APIResponse


class Load(APIResponse):
    """The engine's load; there is one engine, rank 0."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int  # token positions in pages that live sequences hold
    max_total_num_tokens: int
    token_usage: float  # the share of all positions that is used: 0 to 1
    cache_hit_rate: float  # the share of all prompt tokens so far that the prefix cache had
    max_running_requests: int


class Loads(APIResponse):
    """SGLang's `/v1/loads`, which SMG reads."""

    timestamp: str
    dp_rank_count: int
    loads: list[Load]


def load_of(client: EngineClient) -> Load:
    """The engine's load as of its last step; zeros until it has been up."""
    stats, info = client.stats, client.info
    page_size, num_pages = (info.page_size_tokens, info.num_pages) if info else (0, 0)
    return Load(
        dp_rank=0,
        num_running_reqs=stats.num_running,
        num_waiting_reqs=stats.num_waiting,
        num_total_reqs=stats.num_running + stats.num_waiting,
        num_used_tokens=stats.pages_used * page_size,
        max_total_num_tokens=num_pages * page_size,
        token_usage=stats.pages_used / max(1, num_pages),
        cache_hit_rate=stats.cached_tokens / max(1, stats.prompt_tokens),
        max_running_requests=info.max_num_seqs if info else 0,
    )


def add_load_routes(router: APIRouter, client: EngineClient) -> None:
    @router.get("/v1/loads")
    async def loads() -> Loads:
        """How busy the engine is, in the terms of SGLang's /v1/loads."""
        now = datetime.datetime.now(datetime.UTC)
        return Loads(timestamp=now.isoformat(), dp_rank_count=1, loads=[load_of(client)])

    @router.get("/get_load")
    async def get_load() -> dict[str, int]:
        """How many sequences run or wait, as SGLang's /get_load first said it: vllm-router asks."""
        return {"load": load_of(client).num_total_reqs}

    @router.get("/load")
    async def server_load() -> dict[str, int]:
        """How many sequences run or wait, in the terms of vLLM's /load."""
        return {"server_load": load_of(client).num_total_reqs}

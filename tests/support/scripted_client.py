"""An EngineClient that plays scripts, for tests of the server."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outrider.engine.api import EngineInfo, EngineStats, NewRequest, RequestOutput, TokenLogprobs
from outrider.engine.processes.client import EngineState, EngineUnavailableError
from outrider.server.text.tokenizer import Tokenizer

# What happens to a sequence, step by step: outputs, an error to raise, or an event to wait for.
Script = Iterable[RequestOutput | Exception | asyncio.Event]
Play = Callable[[NewRequest], Script]


class ScriptedClient:
    """Every sequence plays what `play(request)` gives; sequences take turns."""

    def __init__(self, play: Play, *, vocab_size: int, max_model_len: int = 1000) -> None:
        self.play = play
        self.state: EngineState = "ready"
        self.status_reason: str | None = None
        self.stats = EngineStats()
        self.info: EngineInfo | None = EngineInfo(
            device="cpu",
            target_dtype="float32",
            batch_invariant=True,
            draft_dtype="float32",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_pages=10,
            page_size_tokens=16,
            cache_bytes=2**20,
            max_num_seqs=8,
            num_speculative_tokens=4,
            max_drafts=4,
            sources=("prediction", "draft_model"),
            proposer="draft_model",
            load_s=1.0,
            warm_up_s=0.0,
            pid=1,
        )
        self.submitted: list[list[NewRequest]] = []
        self.aborted: list[str] = []  # by `abort`, or because their stream was closed
        self.refusal: Exception | None = None
        self.streams: list[_Stream] = []
        self.outruns: Callable[[], bool] = lambda: False  # whether more tokens have come already

    async def start(self) -> EngineInfo:
        assert self.info is not None
        return self.info

    async def generate(self, requests: list[NewRequest]) -> "_Stream":
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(requests)
        self.streams.append(_Stream(self, requests))
        return self.streams[-1]

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for stream in self.streams:
            stream.abort(request_ids)

    async def stop(self) -> None:
        self.state = "stopped"
        for stream in self.streams:
            stream.fail(EngineUnavailableError("the engine was stopped"))


class _Stream:
    def __init__(self, client: ScriptedClient, requests: Sequence[NewRequest]) -> None:
        self._client = client
        self._scripts = {request.request_id: iter(client.play(request)) for request in requests}
        self._aborted: list[str] = []
        self._woken = asyncio.Event()  # by an abort
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> "_Stream":
        return self

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._scripts.pop(request_id, None):
                self._aborted.append(request_id)
                self._woken.set()

    def has_more_tokens(self, request_id: str) -> bool:
        return request_id in self._scripts and self._client.outruns()

    def fail(self, error: Exception) -> None:
        self._failed.set_exception(error)

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(0)
        if self._aborted:
            request_id = self._aborted.pop()
            return RequestOutput(request_id=request_id, token_ids=[], finish_reason="abort")
        if not self._scripts:
            raise StopAsyncIteration
        request_id, script = next(iter(self._scripts.items()))
        item = next(script)
        if isinstance(item, asyncio.Event):
            waits = [asyncio.create_task(event.wait()) for event in (item, self._woken)]
            try:
                await asyncio.wait({*waits, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            finally:  # also if the client leaves meanwhile
                for wait in waits:
                    wait.cancel()
            if self._failed.done():
                self._failed.result()
            return await self.__anext__()
        if isinstance(item, Exception):
            self._scripts.clear()
            raise item
        del self._scripts[request_id]
        if item.finish_reason is None:
            self._scripts[request_id] = script  # to the end of the line
        return item

    async def aclose(self) -> None:
        self._client.aborted += self._scripts
        self._scripts.clear()


def steps(
    request: NewRequest,
    token_ids: Sequence[int],
    *,
    sizes: Iterable[int] = (),
    finish: str = "length",
    cached_tokens: int = 0,
    num_drafts: int = 0,
) -> list[RequestOutput]:
    """Outputs that bring `token_ids` in steps of these sizes, one by one once those are used up.

    Each step had `num_drafts` drafts, and accepted all its tokens but one. Logprobs follow from the
    token ids, so that any two ways of asking agree.
    """
    outputs = []
    left, done, num_steps = iter(sizes), 0, 0
    while done < len(token_ids):
        ids = list(token_ids[done : done + next(left, 1)])
        done += len(ids)
        num_steps += 1
        last = done == len(token_ids)
        outputs.append(
            RequestOutput(
                request_id=request.request_id,
                token_ids=ids,
                logprobs=_logprobs(ids, request.params.logprobs, request.params.logprob_token_ids),
                prompt_logprobs=(
                    _logprobs(request.prompt_token_ids[1:], request.params.prompt_logprobs)
                    if len(ids) == done
                    else None
                ),
                finish_reason=finish if last else None,  # type: ignore[arg-type]
                stop_token_id=ids[-1] if last and finish == "stop" else None,
                num_cached_tokens=cached_tokens,
                source="draft_model" if num_drafts else None,
                num_draft_tokens=num_drafts * num_steps,
                num_accepted_tokens=done - num_steps if num_drafts else 0,
                draft_token_ids=_drafts(ids, num_drafts) if request.returns_drafts else None,
            )
        )
    return outputs


def saying(tokenizer: Tokenizer, text: str, **how: Any) -> Play:
    """The tokens of this text, and then eos if they are to `finish` with a stop."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += [0] * (how.get("finish") == "stop")
    return lambda request: steps(request, ids, **how)


def _drafts(ids: Sequence[int], num_drafts: int) -> list[int]:
    """All but the last of these tokens, and others up to so many, which were rejected."""
    return [*ids[:-1], *[ids[-1] + 1] * num_drafts][:num_drafts]


def _logprobs(
    token_ids: Sequence[int], num_top: int | None, named: Sequence[int] = ()
) -> list[TokenLogprobs] | None:
    if num_top is None:
        return None
    return [
        TokenLogprobs(
            -0.5 - token_id / 1000,
            [(each, -0.5 - each / 1000) for each in named]
            or [(token_id + i, -0.5 - token_id / 1000 - i) for i in range(num_top)],
            rank=1,
        )
        for token_id in token_ids
    ]

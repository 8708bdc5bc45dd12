"""POST /api/chat and /api/generate, and what Ollama's clients ask before: for desktop clients that
speak only this API.
"""

import datetime
import hashlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..base.errors import APIError
from ..base.held import json_bytes
from ..base.json_text import json_text
from ..base.off_loop import off_loop
from ..base.streaming import EventStream
from ..text.message_parser import Text
from .answer import Answer
from .chat_protocol import ChatCompletionRequest
from .chat_turn import prepare_turn
from .completions import prepare_completion
from .generation import Delta, Sample
from .growth import BlockChange, Growth
from .ollama_protocol import FIELDS, OllamaChatRequest, OllamaGenerateRequest, OllamaModelRequest
from .protocol import ChoiceFields
from .service import VERSION, Service
from .tools import object_of
from .translation import renamed_fields

NS = 1_000_000_000


async def _check(service: Service, body: Any, http: Request) -> None:
    if body.asked_model:
        service.check_model(body.asked_model)
    await service.check_fields(body.model_copy(update={"model": None}), http)


def _loaded(service: Service, **empty: Any) -> JSONResponse:
    """To a request that only asks that the model is in memory, which it always is."""
    line = {"model": service.model_name, "created_at": _now()} | empty
    return JSONResponse(line | {"done": True, "done_reason": "load"})


class _LineStream(EventStream):
    """Events as lines of JSON."""

    media_type = "application/x-ndjson"


class _OllamaAnswer(Answer):
    _stream_class = _LineStream

    def __init__(
        self, service: Service, body: ChoiceFields, samples: list[Sample], *, is_chat: bool
    ) -> None:
        super().__init__(service, body, samples)
        self.keeps_body = bool(getattr(body, "tools", ()))
        self._is_chat = is_chat
        self._has_parts = isinstance(body, ChatCompletionRequest)
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._finish_reason = "stop"
        self._growth = Growth()
        self._sign = self._line()

    async def _events(self) -> AsyncIterator[str]:
        async for delta in self._generation:
            for fields in self._added(delta):
                yield self._line(**fields)
        yield self._line(**self._end())

    async def _whole(self) -> str:
        whole: dict[str, list[Any]] = defaultdict(list)
        async for delta in self._generation:
            for fields in self._added(delta):
                for name, value in fields.items():
                    whole[name] += value if name == "tool_calls" else [value]
        said = {
            name: pieces if name == "tool_calls" else "".join(pieces)
            for name, pieces in whole.items()
        }
        return self._line(**said, **self._end())

    async def _failed(self, error: APIError) -> str:
        return json_text(error.ollama_body()) + "\n"

    def _line(self, **fields: Any) -> str:
        line: dict[str, Any] = {"model": self._service.model_name, "created_at": _now()}
        said = {name: fields.pop(name) for name in ("thinking", "tool_calls") if name in fields}
        text = fields.pop("text", "")
        if self._is_chat:
            line["message"] = {"role": "assistant", "content": text} | said
        else:
            line |= {"response": text} | said
        return json_text(line | {"done": False} | fields) + "\n"

    def _added(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """What a delta adds: text, thinking, and whole calls."""
        self._count(delta)
        if self._first_s is None:
            self._first_s = time.perf_counter()
        for part in delta.parts if self._has_parts else [Text(delta.text)]:
            yield from _said(self._growth.add(part))
        if delta.finish_reason is not None:
            yield from _said(self._growth.close())
            self._finish_reason = delta.finish_reason

    def _end(self) -> dict[str, Any]:
        now_s = time.perf_counter()
        first_s = self._first_s or now_s
        return {
            "done": True,
            "done_reason": self._finish_reason,
            "total_duration": int((now_s - self._start_s) * NS),
            "load_duration": 0,
            "prompt_eval_count": self._num_prompt_tokens,
            "prompt_eval_duration": int((first_s - self._start_s) * NS),
            "eval_count": self._num_completion_tokens,
            "eval_duration": int((now_s - first_s) * NS),
        }


def _said(changes: Iterator[BlockChange]) -> Iterator[dict[str, Any]]:
    """Text as it comes, and calls as a whole."""
    for how, block, text in changes:
        if block.call is None and text:
            yield {"thinking" if block.kind == "reasoning" else "text": text}
        elif block.call is not None and how == "closes":
            arguments = object_of(block.text)
            yield {"tool_calls": [{"function": {"name": block.call.name, "arguments": arguments}}]}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def add_ollama_routes(router: APIRouter, service: Service) -> None:
    """The routes of Ollama's API."""
    started = _now()

    @router.post("/chat", response_model=None)
    async def chat(body: OllamaChatRequest, http: Request) -> Answer | Response:
        """Answer a conversation as Ollama's API does; as lines of JSON, or as a whole."""
        await _check(service, body, http)
        if body.only_loads:
            return _loaded(service, message={"role": "assistant", "content": ""})
        with renamed_fields(FIELDS):
            chat = await off_loop(json_bytes(http), body.as_chat)
            samples = await prepare_turn(service, chat, http)
        return _OllamaAnswer(service, chat, samples, is_chat=True)

    @router.post("/generate", response_model=None)
    async def generate(body: OllamaGenerateRequest, http: Request) -> Answer | Response:
        """Answer a prompt in the model's chat template or, if `raw` or with a suffix, go on with
        it, as Ollama's API does; as lines of JSON, or as a whole.
        """
        await _check(service, body, http)
        if body.only_loads:
            return _loaded(service, response="")
        is_raw = body.raw or body.suffix or service.tokenizer.chat_template is None
        with renamed_fields(FIELDS):
            asked: ChoiceFields
            if is_raw:
                completion = await off_loop(json_bytes(http), body.as_completion)
                asked = completion
                samples = await prepare_completion(service, completion, http)
            else:
                asked = chat = await off_loop(json_bytes(http), body.as_chat)
                samples = await prepare_turn(service, chat, http)
        return _OllamaAnswer(service, asked, samples, is_chat=False)

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        """The model that is served, by each of its names."""
        return {"models": [_model(name, started) for name in service.model_names]}

    @router.get("/ps")
    async def running() -> dict[str, Any]:
        """The same: it is always loaded."""
        extra = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        return {"models": [_model(name, started) | extra for name in service.model_names]}

    @router.post("/show")
    async def show(body: OllamaModelRequest, http: Request) -> Response:
        """What the model can do, and how long its context is."""
        if body.asked_model:
            service.check_model(body.asked_model)
        has_template = service.tokenizer.chat_template is not None
        form, capabilities = service.message_format, ["completion"]
        if has_template and form.reads_calls:
            capabilities.append("tools")
        if has_template and form.has_reasoning:
            capabilities.append("thinking")
        shown = {
            "modified_at": started,
            "template": service.tokenizer.info["chat_template"] or "",
            "details": _DETAILS,
            "capabilities": capabilities,
            "model_info": {
                "general.architecture": "outrider",
                "outrider.context_length": service.engine_info.max_model_len,
            },
        }
        return JSONResponse(shown)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}


_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def _model(name: str, modified_at: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": modified_at,
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _DETAILS,
    }

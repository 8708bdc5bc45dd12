"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from ..grammar.tool_choice import NamedTool
from ..text.message_parser import MessagePart
from .answer import Answer
from .chat_protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    TokenLogprob,
    TopLogprob,
)
from .chat_turn import prepare_turn
from .choices import BARE, ChoicesAnswer
from .generation import Delta, Sample, Token
from .growth import AnswerBlock, Growth
from .protocol import STREAM
from .service import Service


def add_chat_routes(router: APIRouter, service: Service) -> None:
    @router.post("/chat/completions", response_model=ChatCompletion, responses=STREAM)
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Answer:
        """Answer a conversation; as a whole, or as server-sent events."""
        return _ChatAnswer(service, body, await prepare_turn(service, body, http))


class _ChatAnswer(ChoicesAnswer):
    def __init__(
        self, service: Service, body: ChatCompletionRequest, samples: list[Sample]
    ) -> None:
        super().__init__(service, body, samples, id_prefix="chatcmpl")
        self.keeps_body = bool(body.tools)
        self._echoed = body.echoed
        self._with_logprobs = body.logprobs
        self._prompt_logprobs_asked = body.prompt_logprobs
        self._with_ids = body.return_token_ids
        self._calls_one_by_name = isinstance(body.tool_choice, NamedTool)
        self._growths = [Growth() for _ in range(body.n)]  # of each choice
        if body.return_token_ids:
            self._head["prompt_token_ids"] = self._prompts[0]

    def _answer(self, choices: list[Any]) -> ChatCompletion | ChatCompletionChunk:
        if not self._stream:
            for name in ("prompt_logprobs", "prompt_token_ids"):
                self._head.setdefault(name, None)  # vLLM's clients expect the fields
            return ChatCompletion(object="chat.completion", choices=choices, **self._head)
        chunk = ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **self._head)
        self._head.pop("prompt_token_ids", None)  # sent only once
        return chunk

    def _opening(self) -> Sequence[ChatChunkChoice]:
        role = ChatDelta(role="assistant", content="")
        return [ChatChunkChoice(index=i, delta=role, **BARE) for i in range(self._n)]

    def _nothing(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta(), **BARE)

    def _choices(self, delta: Delta, *, first: bool) -> Sequence[ChatChoice | ChatChunkChoice]:
        if first and self._prompt_logprobs_asked is not None:
            reported = self._prompt_logprobs(delta, self._prompt_logprobs_asked)
            self._head["prompt_logprobs"] = reported
        said = self._said(delta.index, delta.parts)
        if first and self._echoed:
            said.insert(0, {"content": self._echoed})
        fields: dict[str, Any] = {
            "index": delta.index,
            "logprobs": self._logprobs(delta.tokens) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        ends_in_calls = delta.num_calls and not isinstance(delta.stop_reason, str)
        # As OpenAI does: a client that named the tool to call learns nothing from the reason.
        if delta.finish_reason == "stop" and ends_in_calls and not self._calls_one_by_name:
            fields["finish_reason"] = "tool_calls"
        if self._with_ids:
            fields["token_ids"] = [token.id for token in delta.tokens]
        if self._include_trace:
            fields["trace"] = self._trace(delta)
        if not self._stream:
            fields.setdefault("token_ids", None)  # vLLM's clients expect the field
            return [ChatChoice(message=_message(said), **fields)]
        # One chunk for each call: clients read only one of them from a chunk.
        last: list[dict[str, Any]] = []
        if said:
            last = [said.pop()]
        elif (
            fields["finish_reason"] or fields["logprobs"] or {"token_ids", "trace"} & fields.keys()
        ):
            last = [{}]
        return [
            *(ChatChunkChoice(index=delta.index, delta=ChatDelta(**each), **BARE) for each in said),
            *(ChatChunkChoice(delta=ChatDelta(**each), **fields) for each in last),
        ]

    def _said(self, index: int, parts: Sequence[MessagePart]) -> list[dict[str, Any]]:
        """What the parts add to the message: texts, and calls one by one."""
        said: list[tuple[AnswerBlock, bool, list[str]]] = []  # whether it is new, and its text
        for part in parts:
            for how, block, text in self._growths[index].add(part):
                if how == "opens" or (how == "grows" and not (said and said[-1][0] is block)):
                    said.append((block, how == "opens", []))
                if how == "grows":
                    said[-1][2].append(text)
        return [self._added(block, "".join(pieces), is_new=new) for block, new, pieces in said]

    def _added(self, block: AnswerBlock, text: str, *, is_new: bool) -> dict[str, Any]:
        if block.kind == "text":
            return {"content": text}
        if block.kind == "reasoning":
            return {"reasoning_content": text, "reasoning": text}  # clients read one or the other
        is_free = block.kind == "free_text_call"
        kind, argument = ("custom", "input") if is_free else ("function", "arguments")
        call: dict[str, Any] = {"index": block.num_calls - 1, kind: {argument: text}}
        if is_new:
            call[kind]["name"] = block.started_call.name
            call |= {"id": self._service.message_format.call_id(block.started_call), "type": kind}
        return {"tool_calls": [call]}

    def _logprobs(self, tokens: list[Token]) -> ChatLogprobs:
        content = []
        for token in tokens:
            assert token.logprobs is not None  # they were asked for
            top = [
                TopLogprob(**self._entry(token_id, logprob))
                for token_id, logprob in token.logprobs.top
            ]
            chosen = self._entry(token.id, token.logprobs.logprob)
            content.append(TokenLogprob(**chosen, top_logprobs=top))
        return ChatLogprobs(content=content, refusal=None)


def _message(said: list[dict[str, Any]]) -> ChatMessage:
    """Joins the parts of a message; one without content has calls."""
    texts: dict[str, list[str]] = {}
    calls: list[dict[str, Any]] = []
    for part in said:
        calls += part.get("tool_calls", ())
        for name in part.keys() - {"tool_calls"}:
            texts.setdefault(name, []).append(part[name])
    fields: dict[str, Any] = {"content": None if calls else ""}
    fields |= {name: "".join(pieces) for name, pieces in texts.items()}
    if calls:
        fields["tool_calls"] = calls
    return ChatMessage(role="assistant", refusal=None, **fields)

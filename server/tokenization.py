"""POST /tokenize and /detokenize, GET /tokenizer_info: for clients without a tokenizer."""

import asyncio
from typing import Annotated, Any

from pydantic import Discriminator, FailFast, Field, Tag

from outrider.server.chat import chat_prompt
from outrider.server.chat_protocol import ChatFields
from outrider.server.fields import APIRequest
from outrider.server.protocol import APIResponse, check_unknown_fields
from outrider.server.service import Service


class TokenizeOptions(APIRequest):
    model: str | None = None
    return_token_strs: bool = False


class TokenizePrompt(TokenizeOptions):
    prompt: str
    add_special_tokens: bool = True


class TokenizeChat(TokenizeOptions, ChatFields):
    """A chat, as /v1/chat/completions would make a prompt of it."""


def _tokenize_kind(value: object) -> str:
    return "<chat>" if isinstance(value, dict) and value.get("messages") is not None else "<prompt>"


TokenizeRequest = Annotated[
    Annotated[TokenizePrompt, Tag("<prompt>")] | Annotated[TokenizeChat, Tag("<chat>")],
    Discriminator(_tokenize_kind),
]


class TokenizeResponse(APIResponse):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(APIRequest):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]


class DetokenizeResponse(APIResponse):
    prompt: str


async def tokenize(service: Service, body: TokenizeRequest) -> TokenizeResponse:
    service.check_model(body.model)
    check_unknown_fields(body)
    if isinstance(body, TokenizeChat):
        tokens = (await chat_prompt(service, body, body.tools, body.chat_template_kwargs)).token_ids
    else:
        (tokens,) = await service.tokenize(
            [body.prompt], add_special_tokens=body.add_special_tokens
        )
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=service.engine_info.max_model_len,
        tokens=tokens,
        token_strs=service.tokenizer.pieces(tokens) if body.return_token_strs else None,
    )


async def detokenize(service: Service, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of token ids, special tokens among it."""
    service.check_model(body.model)
    service.check_token_ids(body.tokens, "tokens")
    text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)


def tokenizer_info(service: Service) -> dict[str, Any]:
    """What a tokenizer_config.json would tell about the target's tokenizer."""
    return service.tokenizer.info | {"model_max_length": service.engine_info.max_model_len}

"""POST /tokenize and /detokenize, GET /tokenizer_info: for clients without a tokenizer."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Discriminator, Tag
from starlette.requests import Request
from starlette.responses import Response

from ..base.fields import TokenIdList
from ..base.off_loop import off_loop
from ..base.unknown_fields import Body
from ..grammar.tool_choice import as_function
from .answer_size import PROMPT_TOKEN_BYTES, TOKEN_BYTES, check_bytes
from .chat_protocol import ChatFields
from .chat_turn import chat_prompt
from .protocol import APIResponse
from .service import Service


class TokenizeOptions(Body):
    return_token_strs: bool = False


class TokenizePrompt(TokenizeOptions):
    prompt: str
    add_special_tokens: bool = True


class TokenizeChat(TokenizeOptions, ChatFields):
    """A chat, turned into a prompt as /v1/chat/completions does it."""


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


class DetokenizeRequest(Body):
    tokens: TokenIdList


class DetokenizeResponse(APIResponse):
    prompt: str


def add_tokenizer_routes(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokens_of_text(body: TokenizeRequest, http: Request) -> Response:
        """Token ids of a prompt, or of a conversation as the chat template writes it."""
        await service.check_fields(body, http)
        if isinstance(body, TokenizeChat):
            tools = list(map(as_function, body.tools))
            _, tokens = await chat_prompt(service, body, tools, body.chat_template_kwargs)
            param = "messages"
        else:
            param = "prompt"
            (tokens,) = await service.tokenize(
                [body.prompt], add_special_tokens=body.add_special_tokens
            )
        each_bytes = TOKEN_BYTES if body.return_token_strs else PROMPT_TOKEN_BYTES
        check_bytes(service.settings.max_answer_bytes, param, len(tokens) * each_bytes)

        def write() -> bytes:
            answer = TokenizeResponse(
                count=len(tokens),
                max_model_len=service.engine_info.max_model_len,
                tokens=tokens,
                token_strs=service.tokenizer.pieces(tokens) if body.return_token_strs else None,
            )
            return answer.to_json().encode()

        return await _written(len(tokens), write)

    @router.post("/detokenize", response_model=DetokenizeResponse)
    async def text_of_tokens(body: DetokenizeRequest, http: Request) -> Response:
        """The text of token ids."""
        await service.check_fields(body, http)
        service.check_token_ids(body.tokens, "tokens")
        check_bytes(service.settings.max_answer_bytes, "tokens", len(body.tokens) * TOKEN_BYTES)

        def write() -> bytes:
            text = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
            return DetokenizeResponse(prompt=text).to_json().encode()

        return await _written(len(body.tokens), write)

    @router.get("/tokenizer_info")
    async def info() -> dict[str, Any]:
        """The tokenizer's special tokens and chat template."""
        max_model_len = service.engine_info.max_model_len
        return service.tokenizer.info | {"model_max_length": max_model_len}


async def _written(num_tokens: int, write: Callable[[], bytes]) -> Response:
    """The answer that `write` makes, off the event loop, because a body may hold millions of
    tokens, and one after the other if there are many.
    """
    return Response(await off_loop(num_tokens, write, threshold=0), media_type="application/json")

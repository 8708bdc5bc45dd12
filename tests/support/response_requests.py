"""Requests for responses, and a model with a script."""

from collections.abc import Callable
from typing import Any

from asgi import Reply, post
from scripted_client import steps
from served import Served

from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]


def ask(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    return post(served.app, {"input": "Hi"} | fields, headers, path="/v1/responses")


def saying(serve: Serve, tokenizer: Tokenizer, *texts: str, **settings: Any) -> Served:
    """A model that says one text after the other, and ends each by itself."""
    served = serve(tool_call_format="hermes", reasoning_content=True, **settings)

    def play(request: Any) -> Any:
        text = texts[(len(served.client.submitted) - 1) % len(texts)]
        ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
        cut = ids[: request.params.max_tokens]
        finish = "stop" if cut == ids else "length"
        return steps(request, cut, sizes=(3, 1, 7), finish=finish, cached_tokens=2)

    served.client.play = play
    return served


def events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, whose numbers go up."""
    reported = reply.named_events
    assert [event["sequence_number"] for event in reported] == list(range(len(reported)))
    return reported


def prompts(served: Served) -> list[list[int]]:
    return [requests[0].prompt_token_ids for requests in served.client.submitted]

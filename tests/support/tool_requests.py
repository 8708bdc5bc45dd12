"""Chats with tools, and what a model may say in them."""

from collections.abc import Callable
from typing import Any

import scripted_client
from asgi import Reply, post
from grammars import compile_grammar, fitting
from served import Served

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.server.text.tokenizer import Tokenizer

Allows = Callable[[str | None, str], bool]
EOS = 0
NUMBER = {"type": "integer"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ADD, NEGATE = tool("add", a=NUMBER, b=NUMBER), tool("negate", a=NUMBER)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
CALL_ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
CALL_NEGATE = '{"name": "negate", "arguments": {"a": 1}}'


def fits(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str | None, text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert grammar is not None
    return fitting(compile_grammar(compiler, grammar), [*ids, EOS]) == [*ids, EOS]


def calls_of(reply: Reply) -> tuple[list[Any], Any]:
    """What an answer without content, or a stream, has of calls; and its last choice."""
    stream = reply.body.startswith(b"data: ")
    choices = [part["choices"][0] for part in (reply.chunks if stream else [reply.json()])]
    messages = [choice["delta" if stream else "message"] for choice in choices]
    assert not any(message.get("content") for message in messages)
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return calls, choices[-1]


def says(served: Served, text: str, **how: Any) -> None:
    """Has the model say this, and stop."""
    served.client.play = scripted_client.saying(served.tokenizer, text, **{"finish": "stop"} | how)


def chat(served: Served, **fields: Any) -> Reply:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [ADD, NEGATE]} | fields
    return post(served.app, body, path="/v1/chat/completions")


def grammar_of(served: Served, **fields: Any) -> str:
    reply = chat(served, **fields)
    assert reply.status == 200, reply.body
    grammar = served.client.submitted[-1][0].params.grammar
    assert grammar is not None
    return grammar

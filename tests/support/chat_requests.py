"""Chats as clients send them."""

from collections.abc import Callable
from typing import Any

from asgi import Reply, post
from served import Served

Serve = Callable[..., Served]
HI = [{"role": "user", "content": "Hi"}]
PROMPT = "<user>Hi<eos>\n<assistant>"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(served: Served, **fields: Any) -> Reply:
    return post(served.app, {"messages": HI} | fields, path="/v1/chat/completions")

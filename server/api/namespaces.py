"""Tools in namespaces: an agent sends those of an MCP server in one, and wants both names back.

A model knows each by one name, `namespace__name`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from ..base.fields import MAX_TOOLS


def one_name(name: str, namespace: str | None) -> str:
    """The name that a model knows."""
    return name if namespace is None else f"{namespace}__{name}"


def tools_in(tool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A tool by its name for the model, or those of a namespace. Raises ValueError."""
    match tool:
        case {"type": "namespace", "name": str(namespace), "tools": list(tools)}:
            if len(tools) > MAX_TOOLS:
                raise ValueError(f"a namespace can have at most {MAX_TOOLS} tools")
            for each in tools:
                match each:
                    case {"type": "function" | "custom", "name": str(name)} if name:
                        yield {**each, "name": one_name(name, namespace)}
                    case _:
                        raise ValueError("a namespace has tools of type function and custom")
        case {"type": "function" | "custom"}:
            yield tool
        case {"type": "namespace"}:
            raise ValueError('expected {"type": "namespace", "name": …, "tools": […]}')


def names_of_calls(tools: Iterable[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The two names by which a client knows a tool in a namespace, by its name for the model."""
    return {
        one_name(each["name"], tool["name"]): {"name": each["name"], "namespace": tool["name"]}
        for tool in tools
        if tool["type"] == "namespace"
        for each in tool["tools"]
    }

"""`outrider chat`: a conversation in the terminal, which shows what the drafts were worth."""

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.text import Text

from ..evaluation.remote import (
    DEFAULT_URL,
    TIMEOUT,
    Remote,
    RemoteError,
    chunk_of,
    find,
    has_tokens,
    refusal,
    unreachable,
)
from .errors import give_up
from .options import ApiKeyOption, ModelOption, UrlArgument, finite
from .painter import STYLES, Painter

HELP = """\
/k N    at most N drafts a step; 0: none; /k alone: as the server is set
/reset  begin a new conversation
/quit   leave (so does Ctrl-D)"""


def chat_command(
    url: UrlArgument = DEFAULT_URL,
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", parser=finite, help="Sampling temperature. [default: the server's]"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum tokens per answer. [default: what fits]"),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Makes answers repeatable.")] = None,
    k: Annotated[
        int | None,
        typer.Option(
            "-k", metavar="N", min=0, help="Draft tokens per step; 0: none. [default: adaptive]"
        ),
    ] = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Chat with a running server; colours show which tokens were drafted.

    If the input is not a terminal, each of its lines is a turn.
    """
    console = Console(highlight=False)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # terminals and files have other encodings, too
    if system:
        system = system.encode(errors="replace").decode()  # the same: JSON is UTF-8
    try:
        remote = find(url, api_key, model)
    except RemoteError as error:
        give_up(error, 1)
    options = {"temperature": temperature, "max_completion_tokens": max_tokens, "seed": seed}
    conversation = ChatSession(remote, console, system, options, k)
    console.print(f"{remote.model} at {remote.url}; /help shows what else to type", soft_wrap=True)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` a history)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line.startswith("/"):
            conversation.command(line)
        elif line:
            try:
                conversation.say(line)
            except RemoteError as error:
                typer.echo(f"outrider: {error}", err=True)


def reading(progress: dict[str, int]) -> str:
    """How far the server has read the prompt."""
    return f"reading the prompt: {progress['processed']:,} of {progress['total']:,} tokens"


class ChatSession:
    """The turns so far, and the settings of the next request."""

    def __init__(
        self,
        remote: Remote,
        console: Console,
        system: str | None,
        options: dict[str, Any],
        k: int | None,
    ) -> None:
        self._remote, self._console, self._options = remote, console, options
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)
        self._k = k

    def command(self, line: str) -> None:
        """Carry out a command: a line that begins with a slash."""
        name, _, value = line.partition(" ")
        if name == "/reset":
            self._messages = list(self._first)
        elif name == "/k" and (not value or value.isdecimal()):
            self._k = int(value) if value else None
        else:
            self._console.print(HELP)

    def say(self, text: str) -> None:
        """Ask, and show the answer as it arrives.

        Adds no turn if it raises RemoteError, or if Ctrl-C comes before any of the answer's text.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        painter, answer, started_s, first_s = Painter(), list[str](), time.perf_counter(), 0.0
        waiting = self._console.status("waiting")  # shown on a terminal only
        is_whole = False
        with contextlib.suppress(KeyboardInterrupt), waiting:  # ends the answer, not the chat
            for choice, progress in self._choices(messages):
                if progress is not None:
                    waiting.update(reading(progress))
                if not has_tokens(choice):
                    continue
                waiting.stop()
                first_s = first_s or time.perf_counter() - started_s
                painter.take(choice)
                delta = choice["delta"]
                if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                    self._show(painter, reasoning, "dim italic")
                if content := delta.get("content"):
                    self._show(painter, content)
                    answer.append(content)
            is_whole = True
        self._console.print()
        if is_whole or answer:
            self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
        self._sum_up(painter, first_s, time.perf_counter() - started_s)

    def _choices(
        self, messages: list[dict[str, str]]
    ) -> Iterator[tuple[dict[str, Any], dict[str, int] | None]]:
        """The choices of the answer's chunks, and how far the prompt is computed."""
        speculation: dict[str, Any] = {"trace": True}
        if self._k is not None:
            speculation |= {"enabled": self._k > 0, "num_speculative_tokens": self._k}
        body = self._remote.body(
            messages, **self._options, speculation=speculation, return_progress=True
        )
        try:
            with (
                httpx.Client(timeout=TIMEOUT, headers=self._remote.headers) as client,
                client.stream("POST", self._remote.chat_url, json=body) as response,
            ):
                if response.is_error:
                    response.read()
                    raise refusal(self._remote.url, response)
                for line in response.iter_lines():
                    if chunk := chunk_of(line):
                        for choice in chunk["choices"]:
                            yield choice, chunk.get("prompt_progress")
        except httpx.HTTPError as error:
            raise unreachable(self._remote.url, error) from None

    def _show(self, painter: Painter, text: str, style: str = "") -> None:
        line = Text()
        for piece, kind in painter.paint(text):
            line.append(piece, f"{STYLES[kind]} {style}".strip())
        self._console.print(line, end="", soft_wrap=True)

    def _sum_up(self, painter: Painter, first_s: float, total_s: float) -> None:
        num_tokens = painter.counts.total()
        if not num_tokens:
            return
        line = Text("[", "dim")
        for kind in ("accepted", "recovered", "bonus", "plain"):
            if count := painter.counts[kind]:
                line.append(f"{count} {kind}", STYLES[kind]).append(", ", "dim")
        line.append(f"{num_tokens / painter.num_steps:.1f} tokens a step, ", "dim")
        decode_s = total_s - first_s
        if num_tokens > 1 and decode_s > 0:
            line.append(f"{(num_tokens - 1) / decode_s:.0f} tokens/s, ", "dim")
        line.append(f"first after {first_s:.2f} s]", "dim")
        self._console.print(line, soft_wrap=True)

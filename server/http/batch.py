"""Files of requests, answered by the application without a socket: OpenAI's batch format."""

import asyncio
import concurrent.futures
import itertools
import threading
import uuid
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator
from typing import IO, Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp

from outrider.engine.processes.client import EngineClient, EngineUnavailableError

BUSY, UNAVAILABLE = 429, 503
RETRY_S = 0.5
STREAMING = ("/api/chat", "/api/generate")  # Ollama's routes stream unless asked not to
MAX_LINE_ERROR_CHARS = 300


class BatchLine(BaseModel):
    """One request of the input file."""

    model_config = ConfigDict(strict=True)

    custom_id: str
    method: str = Field(default="POST", pattern="^POST$")
    url: str = Field(pattern="^/")
    body: dict[str, Any]


async def answer_lines(
    app: ASGIApp, engine: EngineClient, file: IO[bytes], *, max_at_once: int
) -> AsyncGenerator[dict[str, Any], None]:
    """Lines of the output file, as requests are done: each has the `custom_id` of its request.

    A line that is no request gets an `error`, with the line's number; a request that is refused
    gets its `response`. Raises EngineUnavailableError once no more can be answered.
    """
    reading, numbers = asyncio.Lock(), itertools.count(1)
    done: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def work(http: httpx.AsyncClient) -> None:
        while True:
            async with reading:
                line, number = await _next_line(file), next(numbers)
            if not line:
                return
            line = line.removeprefix(BOM_UTF8)  # editors on Windows begin files with it
            if line.strip():
                answer = await _answer(http, engine, line)
                if answer["error"] is not None:
                    answer["error"]["line"] = number
                done.put_nowait(answer)

    async def work_at_once() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        try:
            async with client as http, asyncio.TaskGroup() as tasks:
                for _ in range(max_at_once):
                    tasks.create_task(work(http))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            done.put_nowait(None)

    working = asyncio.create_task(work_at_once())
    try:
        while (answer := await done.get()) is not None:
            yield answer
        await working
    finally:
        working.cancel()
        await asyncio.wait([working])


async def _next_line(file: IO[bytes]) -> bytes:
    """The next line, which a pipe may be slow to give; nothing at the end."""
    line_read: concurrent.futures.Future[bytes] = concurrent.futures.Future()
    line_read.set_running_or_notify_cancel()

    def read() -> None:
        try:
            line_read.set_result(file.readline())
        except OSError as error:
            line_read.set_exception(error)

    # Not asyncio's own threads: the process could not end before such a thread has read its line.
    threading.Thread(target=read, daemon=True).start()
    return await asyncio.wrap_future(line_read)


async def _answer(http: httpx.AsyncClient, engine: EngineClient, line: bytes) -> dict[str, Any]:
    result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None}
    result |= {"response": None, "error": None}
    try:
        request = BatchLine.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        message = f"{place}: {problem['msg']}".removeprefix(": ").replace("line 1 column", "column")
        return result | {"custom_id": _id_of(line), "error": _invalid_line(message)}
    result["custom_id"] = request.custom_id
    for name in ("stream", "background"):
        if request.body.get(name):
            return result | {"error": _invalid_line(f"{name}: a batch is answered as a whole")}
    try:
        if httpx.URL(request.url).path.rstrip("/") in STREAMING:
            request.body["stream"] = False
        reply = await _reply(http, engine, request)
    except (ValueError, httpx.InvalidURL) as error:  # ValueError: NaN is no JSON
        return result | {"error": _invalid_line(f"this cannot be sent: {error}")}
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id"),
        "body": reply.json(),
    }
    return result | {"response": response}


async def _reply(
    http: httpx.AsyncClient, engine: EngineClient, request: BatchLine
) -> httpx.Response:
    while True:
        before = engine.state
        reply = await http.post(request.url, json=request.body)
        was_down = reply.status_code == UNAVAILABLE and {before, engine.state} != {"ready"}
        if reply.status_code != BUSY and not was_down:
            return reply
        if engine.state in ("failed", "stopped"):
            raise EngineUnavailableError(engine.status_reason)
        await asyncio.sleep(RETRY_S)  # an engine comes back; requests of this batch fill the queue


def _invalid_line(message: str) -> dict[str, str]:
    return {"code": "invalid_line", "message": message[:MAX_LINE_ERROR_CHARS]}


def _id_of(line: bytes) -> str | None:
    """The custom_id of an invalid line, if it has one."""
    try:
        given = from_json(line).get("custom_id")
    except (ValueError, AttributeError):
        return None
    return given if isinstance(given, str) else None

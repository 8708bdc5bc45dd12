"""Files of requests, answered by the application without a socket: OpenAI's batch format."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp

BUSY = 429
RETRY_S = 0.5
MAX_REASON_CHARS = 300


class BatchLine(BaseModel):
    """One request of the input file."""

    model_config = ConfigDict(strict=True)

    custom_id: str
    method: str = Field(default="POST", pattern="^POST$")
    url: str = Field(pattern="^/")
    body: dict[str, Any]


async def answer_lines(
    app: ASGIApp, lines: Iterable[str], *, max_at_once: int
) -> AsyncIterator[dict[str, Any]]:
    """Lines of the output file, as requests are done: each has the `custom_id` of its request.

    A line that is no request gets an `error`; a request that is refused gets its `response`.
    """
    slots = asyncio.Semaphore(max_at_once)
    done: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as http,
        asyncio.TaskGroup() as tasks,
    ):

        async def run(line: str) -> None:
            try:
                done.put_nowait(await _answer(http, line))
            finally:
                slots.release()

        started = finished = 0
        for line in lines:
            if line.strip():
                await slots.acquire()
                tasks.create_task(run(line))
                started += 1
            while not done.empty():
                finished += 1
                yield done.get_nowait()
        while finished < started:
            finished += 1
            yield await done.get()


async def _answer(http: httpx.AsyncClient, line: str) -> dict[str, Any]:
    told: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None}
    told |= {"response": None, "error": None}
    try:
        request = BatchLine.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        message = f"{place}: {problem['msg']}".removeprefix(": ")
        return told | {"custom_id": _id_of(line), "error": _invalid_line(message)}
    told["custom_id"] = request.custom_id
    if request.body.get("stream"):
        return told | {"error": _invalid_line("stream: a batch is answered as a whole")}
    try:
        reply = await _reply(http, request)
    except (ValueError, httpx.InvalidURL) as error:  # ValueError: NaN is no JSON
        return told | {"error": _invalid_line(f"this cannot be sent: {error}")}
    if reply.headers.get("content-type") != "application/json":
        reason = f"url: {request.url} is answered with status {reply.status_code} and no JSON"
        return told | {"error": _invalid_line(reason)}
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id"),
        "body": reply.json(),
    }
    return told | {"response": response}


async def _reply(http: httpx.AsyncClient, request: BatchLine) -> httpx.Response:
    while True:
        reply = await http.post(request.url, json=request.body)
        if reply.status_code != BUSY:
            return reply
        await asyncio.sleep(RETRY_S)  # requests of this same batch fill the queue


def _invalid_line(message: str) -> dict[str, str]:
    return {"code": "invalid_line", "message": message[:MAX_REASON_CHARS]}


def _id_of(line: str) -> str | None:
    """The custom_id of an invalid line, if it has one."""
    try:
        given = from_json(line).get("custom_id")
    except (ValueError, AttributeError):
        return None
    return given if isinstance(given, str) else None

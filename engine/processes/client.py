"""How the server uses an engine: submit sequences, receive their tokens, watch its state."""

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from itertools import count, zip_longest

from ..api import (
    EngineInfo,
    EngineState,
    EngineStats,
    InvalidRequestError,
    NewRequest,
    QueueFullError,
    ReportProgress,
    RequestOutput,
    ignore_progress,
)
from .connection import Connection
from .messages import (
    Abort,
    Admitted,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Refused,
    StepOutputs,
    Submit,
    ToEngine,
)


class EngineUnavailableError(RuntimeError):
    """The engine is not, or no longer, available: starting, restarting, failed or stopped."""


class OutputStream:
    """Outputs of sequences that were submitted together, interleaved, until all have finished."""

    def __init__(self, abort: Callable[[Collection[str]], None], request_ids: list[str]) -> None:
        self._abort = abort
        self._unread: deque[RequestOutput] = deque()
        self._error: EngineUnavailableError | None = None  # raised once all is read
        self._news: asyncio.Future[None] | None = None  # what the reader waits for
        self.unfinished = set(request_ids)
        self.admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def admit(self) -> None:
        if not self.admission.done():  # it is done if it was cancelled
            self.admission.set_result(None)

    def put(self, output: RequestOutput) -> None:
        self._unread.append(output)
        if output.finish_reason is not None:
            self.unfinished.discard(output.request_id)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Turn the submission away, or end it with this error if it was admitted."""
        self.unfinished.clear()
        if not self.admission.done():
            self.admission.set_exception(error)
        elif isinstance(error, EngineUnavailableError):
            self._error = error
        self._wake()

    def has_more_tokens(self, request_id: str) -> bool:
        """Whether tokens of this sequence have come that were not read yet."""
        return any(each.request_id == request_id and each.token_ids for each in self._unread)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self.unfinished:
                raise StopAsyncIteration
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            except asyncio.CancelledError:
                await self.aclose()
                raise
        return self._unread.popleft()

    async def aclose(self) -> None:
        """Abort unfinished sequences. May be called after the end, and again."""
        if self.unfinished:
            self._abort(self.unfinished)
            self.unfinished.clear()
        self._unread.clear()
        self._error = None
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class EngineClient(ABC):
    """The server's end of one engine, which passes the engine's answers to the open streams.

    Subclasses start the engine and connect to it.

    `state` goes from "starting" to "ready". If the engine dies, it becomes "restarting" and then
    "ready" again. "failed" (it could not start, or keeps dying) and "stopped" are final: make a new
    client. `status_reason` explains any state other than "starting" and "ready". `info` is set once
    the engine was ready.
    """

    def __init__(self, report: ReportProgress = ignore_progress) -> None:
        self.state: EngineState = "starting"
        self.status_reason: str | None = None
        self.info: EngineInfo | None = None
        self._report = report
        self._connection: Connection[FromEngine] | None = None  # while there is an engine
        self._up: asyncio.Future[EngineInfo] | None = None  # awaited by `start`
        self._last_words = ""  # the reason, if the engine said that it cannot go on
        self._submission_ids = count()
        self._submitted: dict[int, OutputStream] = {}  # by submission id, not answered yet
        self._running: dict[str, OutputStream] = {}  # by request id, admitted and not finished
        self.on_change: Callable[[], None] = lambda: None  # called after each change of state
        self._stats = EngineStats()  # of the present engine
        self._past_stats = EngineStats()  # of the engines before it

    @property
    def stats(self) -> EngineStats:
        """Gauges of the last step; counters since the client started, also over restarts."""
        return _add_counters(self._past_stats, self._stats)

    async def start(self) -> EngineInfo:
        """Start the engine; raises EngineUnavailableError with the engine's own message.

        Always call `stop` afterwards, even if this is cancelled.
        """
        self._up = asyncio.get_running_loop().create_future()
        self._launch()
        return await self._up

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine and clean up; open streams raise."""

    @abstractmethod
    def _launch(self) -> None:
        """Start the engine. Its messages go to `_receive`; `_down` is called when it ends."""

    def _send(self, message: ToEngine) -> None:
        """Send a message without waiting; without an engine, do nothing."""
        if self._connection is not None:
            self._connection.send(message)

    async def generate(self, requests: list[NewRequest]) -> OutputStream:
        """Submit sequences together; returns once the engine has admitted them.

        Raises QueueFullError, InvalidRequestError or EngineUnavailableError before that, and
        EngineUnavailableError from the stream if the engine dies meanwhile. Close the stream after
        use; cancelling a task that waits on it closes it too.
        """
        if self.state != "ready":
            raise EngineUnavailableError(self.status_reason or "the engine is still starting")
        ids = [request.request_id for request in requests]
        submission_id, stream = next(self._submission_ids), OutputStream(self._drop, ids)
        try:
            self._send(Submit(submission_id, requests))
        except OverflowError as error:
            raise InvalidRequestError(f"a number is too large: {error}") from None
        self._submitted[submission_id] = stream  # only now: if sending fails, no answer will come
        try:
            await stream.admission
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_ids: list[str]) -> None:
        """Stop sequences early. Their pages are free within a step, and each gets a last output
        with finish reason "abort". Unknown and finished ids are ignored.
        """
        running = {i: stream for i in request_ids if (stream := self._running.get(i))}
        if running:
            self._drop(running)
        for request_id, stream in running.items():
            stream.put(RequestOutput(request_id=request_id, token_ids=[], finish_reason="abort"))

    def _drop(self, request_ids: Collection[str]) -> None:
        """Stop sequences whose output nobody reads any more."""
        for request_id in request_ids:
            self._running.pop(request_id, None)
        self._send(Abort(list(request_ids)))

    def _receive(self, message: FromEngine) -> None:
        """Handle a message of the engine. Outputs with unknown ids are of dropped sequences."""
        if self.state == "stopped":
            return
        match message:
            case StepOutputs(outputs, stats):
                self._stats = stats
                for output in outputs:
                    if stream := self._running.get(output.request_id):
                        stream.put(output)
                        if output.finish_reason is not None:
                            del self._running[output.request_id]
            case Admitted(submission_id):
                stream = self._submitted.pop(submission_id)
                self._running |= dict.fromkeys(stream.unfinished, stream)
                stream.admit()
            case Refused(submission_id, reason, text):
                self._submitted.pop(submission_id).fail(_REFUSALS[reason](text))
            case Loading(stage, done, total):
                self._report(stage, done, total)
            case Ready(info):
                self.info, self.state, self.status_reason = info, "ready", None
                if self._up and not self._up.done():
                    self._up.set_result(info)
                self.on_change()
            case Failed(text):
                self._last_words = text

    def _down(self, state: EngineState, reason: str) -> None:
        """Enter a state without an engine; open streams end with the reason."""
        self.state, self.status_reason = state, reason
        self._past_stats, self._stats = self.stats, EngineStats()
        streams = {*self._submitted.values(), *self._running.values()}
        self._submitted.clear()
        self._running.clear()
        for stream in streams:
            stream.fail(EngineUnavailableError(reason))
        if self._up and not self._up.done():
            self._up.set_exception(EngineUnavailableError(reason))
        self.on_change()


_REFUSALS: dict[str, type[Exception]] = {
    "queue_full": QueueFullError,
    "invalid": InvalidRequestError,
}
_GAUGES = {
    "num_running",
    "num_waiting",
    "pages_used",
    "pages_total",
    "host_pages_used",
    "host_pages_total",
}


def _add_counters(past: EngineStats, now: EngineStats) -> EngineStats:
    totals: dict[str, int | list[int]] = {}
    for field in dataclasses.fields(EngineStats):
        before, since = getattr(past, field.name), getattr(now, field.name)
        if field.name in _GAUGES:
            totals[field.name] = since
        elif isinstance(since, list):
            totals[field.name] = [a + b for a, b in zip_longest(before, since, fillvalue=0)]
        else:
            totals[field.name] = before + since
    return EngineStats(**totals)  # type: ignore[arg-type]

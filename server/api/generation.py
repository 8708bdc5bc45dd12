"""Turns the engine's tokens into text; every endpoint that generates is built on this."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from outrider.engine.api import FinishReason, NewRequest, RequestOutput, TokenLogprobs
from outrider.engine.processes.client import EngineClient, EngineUnavailableError, OutputStream

from ..base.errors import dead_end, internal_error, timed_out, unavailable
from ..observe.metrics import Metrics
from ..text.detokenizer import Detokenizer, StopStrings
from ..text.message_parser import MessagePart
from ..text.message_reader import MessageReader
from ..text.tokenizer import Tokenizer
from .acceptance import AcceptanceCounts
from .protocol import PromptProgress
from .trace import TraceStep

MOST_HELD = 64  # tokens of a chunk, if a client has not read for long
TURN_OUTPUTS = 16  # read of those that have come already, until others get a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How the tokens of a request become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    detokenize: bool = True
    skipped_ids: frozenset[int] = frozenset()  # special tokens, which do not appear in the text
    spaces_between_special: bool = True


@dataclass(slots=True)  # not frozen, which takes longer to make: every event has some
class Token:
    """One emitted token; `text_offset` counts the characters of its sequence before it."""

    id: int
    text_offset: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True, kw_only=True)  # not frozen, like its tokens
class Delta:
    """What was added to one sequence: text, and the tokens that it came from.

    The answers of all APIs are made of these. In a chat, `parts` is the text taken apart. One with
    `progress` adds nothing: it says how far the prompt is computed, if that was asked for.
    """

    index: int
    text: str = ""
    parts: list[MessagePart] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0  # of this sequence, so far
    reasoning_tokens: int = 0  # how many of these are reasoning
    num_calls: int = 0  # tool calls so far
    cached_tokens: int = 0  # prompt tokens found in the cache
    # From the prompt's second token on, if asked for.
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    # The steps that produced the tokens, if a trace was asked for.
    steps: list[TraceStep] = field(default_factory=list)
    progress: PromptProgress | None = None


class Sample:
    """One sequence of a request, which it turns from token ids into text.

    A stop string ends it after the token that completes the string. Later tokens of the same step
    are dropped, so that a speculative step ends where plain decoding would.
    """

    def __init__(
        self,
        index: int,
        request: NewRequest,
        tokenizer: Tokenizer,
        options: TextOptions,
        reader: MessageReader | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.finished = False
        self.acceptance = AcceptanceCounts()
        self._options = options
        self._reader = reader
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_token_ids,
            skipped_ids=options.skipped_ids,
            spaces_between_special=options.spaces_between_special,
        )
        self._tokenizer = tokenizer
        self._stops = StopStrings(options.stop, include=options.include_stop)
        self._hidden_stop = ""  # text of the stop that ended the sequence, if it is not shown
        self.queue_s = 0.0
        self.num_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_chars = 0
        self._num_steps = 0
        self._text = ""  # held back, because more has come already
        self._pending: list[Token] = []  # tokens whose text is held back
        self._pending_steps: list[TraceStep] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def take(self, output: RequestOutput, *, more: bool = False) -> Delta | None:
        """Add a step's tokens; None if there is nothing to show yet.

        With `more`, further tokens have come already, and up to MOST_HELD are shown with them: so
        a server that the engine outruns sends fewer, longer chunks, which cost it less.
        """
        num_accepted_before = self.acceptance.num_accepted_tokens
        self.acceptance.observe(output)
        self.queue_s = output.queue_s
        self._prompt_logprobs += output.prompt_logprobs or ()
        shown: list[str] = []
        texts: list[str] = []  # one for each token
        logprobs: Sequence[TokenLogprobs | None] = output.logprobs or [None] * len(output.token_ids)
        last = len(output.token_ids) - 1
        for position, (token_id, entry) in enumerate(zip(output.token_ids, logprobs, strict=True)):
            self.num_tokens += 1
            self._pending.append(Token(token_id, self._num_chars, entry))
            hidden = (
                output.stop_token_id is not None
                and position == last
                and not self._options.include_stop
            )
            texts.append("")
            if hidden:
                self._hidden_stop = self._tokenizer.token_text(token_id)
            elif self._options.detokenize:
                texts[-1] = self._detokenizer.push(token_id)
                shown.append(self._match(texts[-1]))
            if self._stops.matched is not None:
                self._hidden_stop = "" if self._options.include_stop else self._stops.matched
                break
        else:
            if output.finish_reason is not None:
                shown.append(self._match(self._detokenizer.flush()))
                shown.append(self._stops.flush())
        self._num_steps += bool(texts)
        if texts and output.draft_token_ids is not None:
            self._pending_steps.append(
                TraceStep(
                    number=self._num_steps,
                    draft_token_ids=output.draft_token_ids,
                    num_accepted=output.num_accepted_tokens - num_accepted_before,
                    token_ids=output.token_ids[: len(texts)],
                    texts=texts,
                    source=output.source,
                )
            )
        self._text += "".join(shown)
        if more and len(self._pending) < MOST_HELD and self._stops.matched is None:
            return None
        text, self._text = self._text, ""
        return self._delta(text, output)

    def _match(self, text: str) -> str:
        self._num_chars += len(text)
        may_stop = self.num_tokens > self.request.params.min_tokens
        return self._stops.push(text, may_stop=may_stop)

    def _delta(self, text: str, output: RequestOutput) -> Delta | None:
        finish_reason: Literal["stop", "length"] | None = None
        stop_reason: int | str | None = None
        if self._stops.matched is not None:
            finish_reason, stop_reason = "stop", self._stops.matched
        elif output.finish_reason is not None:
            finish_reason = "length" if output.finish_reason == "length" else "stop"
            if output.stop_token_id in self.request.params.stop_token_ids:
                stop_reason = output.stop_token_id
        self.finished = finish_reason is not None
        has_tokens = bool(self._pending) and not self._options.detokenize
        if not (text or has_tokens or self.finished):
            return None
        tokens, self._pending = self._pending, []
        steps, self._pending_steps = self._pending_steps, []
        parts: list[MessagePart] = []
        if self._reader is not None:
            parts = self._reader.read(text, ended=self.finished, hidden=self._hidden_stop)
            offsets = (token.text_offset for token in tokens)
            self._num_reasoning_tokens = self._reader.num_reasoning(offsets)
        return Delta(
            index=self.index,
            text=text,
            parts=parts,
            tokens=tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            completion_tokens=self.num_tokens,
            reasoning_tokens=self._num_reasoning_tokens,
            num_calls=self._reader.num_calls if self._reader is not None else 0,
            cached_tokens=output.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
            steps=steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of all sequences of a request together."""

    queue_s: float  # until the first of them was in a step
    first_token_s: float  # from there to the first token of any
    generation_s: float  # from there to the last token of any
    token_s: float | None  # between two tokens of a sequence, on average
    tokens_per_s: float | None  # from the first step to the last token


class Generation:
    """The samples of one request, admitted by the engine; iterate once, and always `aclose`."""

    def __init__(
        self,
        client: EngineClient,
        outputs: OutputStream,
        samples: Sequence[Sample],
        metrics: Metrics,
        *,
        start_s: float,
        timeout_s: float,
    ) -> None:
        """`start_s`: when they were submitted, by `time.perf_counter`."""
        self._client = client
        self._outputs = outputs
        self._samples = {sample.request.request_id: sample for sample in samples}
        self._metrics = metrics
        self._start_s = start_s
        self._timeout_s = timeout_s  # 0: no limit
        self._timer: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None
        if timeout_s:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        # By sequence, since the start: its first token, and its last one so far.
        self._first_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    @classmethod
    async def start(
        cls, client: EngineClient, samples: Sequence[Sample], metrics: Metrics, timeout_s: float
    ) -> "Generation":
        """Submit all samples together; raises what `EngineClient.generate` raises."""
        start_s = time.perf_counter()
        outputs = await client.generate([sample.request for sample in samples])
        return cls(client, outputs, samples, metrics, start_s=start_s, timeout_s=timeout_s)

    @property
    def time_to_first_token_s(self) -> float | None:
        """From submission to the first token of any sample."""
        return min(self._first_s.values(), default=None)

    @property
    def times(self) -> Times | None:
        """Times so far; None before the first token."""
        first_s, last_s = self._first_s, self._last_s
        if not first_s:
            return None
        begun = [self._samples[request_id] for request_id in first_s]
        queue_s = min(sample.queue_s for sample in begun)
        num_tokens = sum(sample.num_tokens for sample in begun)
        decoding_s = sum(last_s[name] - first_s[name] for name in first_s)
        num_gaps = num_tokens - len(begun)
        first, last = min(first_s.values()), max(last_s.values())
        inference_s = last - queue_s
        return Times(
            queue_s=queue_s,
            first_token_s=max(0.0, first - queue_s),
            generation_s=last - first,
            token_s=decoding_s / num_gaps if num_gaps > 0 else None,
            tokens_per_s=num_tokens / inference_s if inference_s > 0 else None,
        )

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas of all samples as they arrive; raises APIError or EngineUnavailableError."""
        unfinished, num_read = len(self._samples), 0
        try:
            async for output in self._outputs:
                num_read += 1
                if num_read % TURN_OUTPUTS == 0:  # the stream waits only if it has nothing
                    await asyncio.sleep(0)
                if output.finish_reason == "error":
                    self._end(self._samples[output.request_id], "error")
                    error = dead_end if output.is_dead_end else internal_error
                    raise error(output.error or "The engine failed on this request.")
                sample = self._samples[output.request_id]
                if sample.finished:
                    continue
                if output.finish_reason == "abort" and self._expiry is not None:
                    raise timed_out(self._timeout_s)
                if output.finish_reason == "abort":
                    raise unavailable("The server stopped this request.", code="aborted")
                self._note_time(output)
                if output.num_computed_prompt_tokens is not None:
                    yield self._progress(sample, output, output.num_computed_prompt_tokens)
                delta = sample.take(output, more=self._outputs.has_more_tokens(output.request_id))
                if delta is not None and delta.finish_reason is not None:
                    self._end(sample, delta.finish_reason)
                    unfinished -= 1
                    if output.finish_reason is None and unfinished:
                        await self._client.abort([output.request_id])
                if delta is not None:
                    yield delta
                if not unfinished:
                    return
        except EngineUnavailableError:
            for sample in self._samples.values():
                if not sample.finished:
                    self._end(sample, "error")
            raise
        if unfinished:
            raise internal_error("The engine ended this request before it was finished.")

    def _progress(self, sample: Sample, output: RequestOutput, num_computed: int) -> Delta:
        progress = PromptProgress(
            total=len(sample.request.prompt_token_ids),
            cache=output.num_cached_tokens,
            processed=num_computed,
            time_ms=max(0, round(1000 * (self._elapsed_s - output.queue_s))),
        )
        return Delta(index=sample.index, cached_tokens=output.num_cached_tokens, progress=progress)

    async def aclose(self) -> None:
        """Abort the sequences of this request that still run."""
        if self._timer is not None:
            self._timer.cancel()
        for sample in self._samples.values():
            if not sample.finished:
                self._end(sample, "abort")
        await self._outputs.aclose()

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        sample.finished = True
        self._metrics.sequences_ended.labels(reason).inc()

    def _expire(self) -> None:
        self._expiry = asyncio.create_task(self._client.abort(list(self._samples)))

    @property
    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    def _note_time(self, output: RequestOutput) -> None:
        if not output.token_ids:
            return
        now_s = self._elapsed_s
        last_s = self._last_s.get(output.request_id)
        if last_s is None:
            self._first_s[output.request_id] = now_s
            self._metrics.time_to_first_token.observe(now_s)
        else:
            self._metrics.inter_token_latency.observe((now_s - last_s) / len(output.token_ids))
        self._last_s[output.request_id] = now_s

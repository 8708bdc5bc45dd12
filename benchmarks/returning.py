"""Agents that come back: how long a long prompt takes the first time, and once others have
needed its pages.

    python benchmarks/returning.py [MODEL] [--draft HEAD] [--tokens-in 30000] [--turns 20]
        [--new-tokens 16] [--layers 8] [--host-gib 8] [--seconds 40]

Needs torch, triton and transformers only. Without MODEL it takes layers of Qwen3-8B's shape with
random weights; for all 36 of them, make MODEL by published_shapes.py, and take 12 GiB. Each turn
sends the whole conversation again, with the last answer and a little more. Between two turns
somebody else sends a prompt as long, for which the device has no other room than the
conversation's; host memory has room for both. Answers are greedy. The last turn is computed once
more with nothing cached, and must be answered alike. After `--seconds` no further turn begins, so
that it ends in any case.

Then it says where the time of a later turn goes until its first token. What the GPU does is timed
by its own clock, on the stream that does it.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from random_model import save_random_model

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine
from outrider.engine.plan import Plan
from outrider.engine.worker import LaunchedStep

PAGE = 16
ADDED_TOKENS = 100  # by each turn, besides the answer
IDS = range(100, 4000)  # of prompts


class Answer(NamedTuple):
    token_ids: list[int]
    num_cached_tokens: int
    first_token_s: float


class Part(NamedTuple):
    begin_ms: float  # since the turn was asked
    end_ms: float
    num_bytes: int = 0


class Watch:
    """The parts of a turn up to the launch of its first step, and that step."""

    def __init__(self, engine: Engine) -> None:
        assert engine.worker.host_pages is not None
        _, self._pages = engine.worker.host_pages
        self._is_gpu = engine.worker.device.type == "cuda"
        self._launch, engine.worker.launch = engine.worker.launch, self._launched  # type: ignore[method-assign]
        for name in ("save", "load"):
            setattr(self._pages, name, self._copying(name, getattr(self._pages, name)))
        self.begin()

    def begin(self) -> None:
        """A turn is asked now."""
        self._num_bytes = {"save": 0, "load": 0}
        self._events: dict[str, list[torch.cuda.Event]] = {"save": [], "load": []}
        self._host: dict[str, Part] = {}
        self._step: LaunchedStep | None = None
        self._asked, self._asked_s = self._event(None), time.perf_counter()

    def queued(self) -> None:
        self._host["host: check and queue"] = Part(0.0, self._now_ms())

    def parts(self) -> dict[str, Part]:
        """Of the turn, once it has been answered."""
        found = {**self._host}
        if self._is_gpu:
            torch.cuda.synchronize()
            for name, label in (("load", "GPU: copies in"), ("save", "GPU: copies out")):
                if events := self._events[name]:
                    found[label] = self._between(events[0], events[-1], self._num_bytes[name])
            if self._step is not None and self._step.begin and self._step.end:
                found["GPU: step"] = self._between(self._step.begin, self._step.end)
        return found

    def _copying(self, name: str, copy: Callable[..., None]) -> Callable[..., None]:
        def watched(group: int, pages: list[int], others: list[int]) -> None:
            events = self._events[name]
            stream = getattr(self._pages, "_saving" if name == "save" else "_loading", None)
            if self._step is None:
                if not any(self._num_bytes.values()):
                    self._follow("host: hash and match")
                self._num_bytes[name] += len(pages) * self._pages._sizes[group]  # type: ignore[attr-defined]
                events += [] if events else [self._event(stream)]
            copy(group, pages, others)
            if self._step is None:
                events.append(self._event(stream))

        return watched

    def _launched(self, plan: Plan) -> LaunchedStep:
        if self._step is not None:
            return self._launch(plan)
        self._follow("host: list pages, begin copies, seat")
        self._step = self._launch(plan)
        self._follow("host: launch the step")
        return self._step

    def _follow(self, name: str) -> None:
        """Something of the host's ends now, which began where the last one ended."""
        begin_ms = max((part.end_ms for part in self._host.values()), default=0.0)
        self._host[name] = Part(begin_ms, self._now_ms())

    def _now_ms(self) -> float:
        return (time.perf_counter() - self._asked_s) * 1e3

    def _event(self, stream: Any) -> Any:
        if not self._is_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event

    def _between(self, begin: Any, end: Any, num_bytes: int = 0) -> Part:
        times = (self._asked.elapsed_time(event) for event in (begin, end))
        return Part(*times, num_bytes)


def print_parts(turns: list[dict[str, Part]]) -> None:
    """The medians of all turns that have a part."""
    print("where the time of a later turn goes            from ms    to ms")
    names = dict.fromkeys(name for turn in turns for name in turn)
    for name in names:
        begins, ends, sizes = zip(*(turn[name] for turn in turns if name in turn), strict=True)
        begin, end, size = map(statistics.median, (begins, ends, sizes))
        rate = f"   {size / 1e9:.2f} GB, {size / 1e6 / (end - begin):.1f} GB/s" if size else ""
        print(f"  {name:<42} {begin:9.1f} {end:8.1f}{rate}")


def ask(engine: Engine, prompt: list[int], new_tokens: int, watch: Watch | None = None) -> Answer:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    if watch is not None:
        watch.begin()
    start_s, first_s = time.perf_counter(), 0.0
    engine.submit([NewRequest(request_id="turn", prompt_token_ids=prompt, params=params)])
    if watch is not None:
        watch.queued()
    token_ids, num_cached = list[int](), 0
    while engine.has_work():
        for output in engine.step():
            if output.token_ids and not token_ids:
                first_s = time.perf_counter() - start_s
            token_ids += output.token_ids
            num_cached = output.num_cached_tokens
    return Answer(token_ids, num_cached, first_s)


def configure(args: argparse.Namespace, model: str) -> EngineConfig:
    longest = args.tokens_in + args.turns * (args.new_tokens + ADDED_TOKENS) + args.new_tokens
    num_pages = longest // PAGE + 32
    return EngineConfig(
        target=ModelConfig(path=model, dtype=args.dtype),
        draft=ModelConfig(path=args.draft, dtype=args.dtype) if args.draft else None,
        device=args.device,
        max_model_len=longest,
        enforce_eager=True,  # starts sooner, and prompts run launch by launch anyway
        cache=CacheConfig(page_size_tokens=PAGE, num_pages=num_pages, host_gib=args.host_gib),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=args.chunk),
        speculation=SpeculationConfig(num_speculative_tokens=3 if args.draft else 0),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft")
    parser.add_argument("--tokens-in", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096, help="less, to try it on a CPU")
    parser.add_argument("--chunk", type=int, default=8192, help="rows of a step")
    parser.add_argument("--host-gib", type=float, default=8.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=40.0)
    args = parser.parse_args()
    until_s = time.monotonic() + args.seconds
    rng = random.Random(0)
    with nullcontext(args.model) if args.model else tempfile.TemporaryDirectory() as model:
        if args.model is None:
            save_random_model(Path(model), args.layers, width=args.width, inner=3 * args.width)
        config = configure(args, model)
        engine = Engine(config)
        print(f"ready, with {until_s - time.monotonic():.0f} s left", flush=True)
        watch, parts = Watch(engine), list[dict[str, Part]]()
        ask(engine, rng.choices(IDS, k=args.tokens_in), 2)  # loads what is loaded late
        prompt, turns = rng.choices(IDS, k=args.tokens_in), list[Answer]()
        while len(turns) < args.turns and (not turns or time.monotonic() < until_s):
            turns.append(answer := ask(engine, prompt, args.new_tokens, watch))
            parts.append(watch.parts())
            print(
                f"turn {len(turns)}: first token after {answer.first_token_s:.4f} s, "
                f"{answer.num_cached_tokens} of {len(prompt)} tokens cached",
                flush=True,
            )
            last = prompt
            prompt = [*prompt, *answer.token_ids, *rng.choices(IDS, k=ADDED_TOKENS)]
            ask(engine, rng.choices(IDS, k=args.tokens_in), 1)
        stats = engine.stats()
        engine.start_over()
        again = ask(engine, last, args.new_tokens)
        assert again.num_cached_tokens == 0
    first, later = turns[0].first_token_s, [turn.first_token_s for turn in turns[1:]]
    is_alike = again.token_ids == turns[-1].token_ids
    print(f"{args.tokens_in} tokens, {len(turns)} turns of {args.turns}, chunks of {args.chunk}")
    print(f"first turn: time to the first token             {first:.3f} s")
    if later:
        median = statistics.median(later)
        print(f"later turns, median                             {median:.3f} s")
        print(f"later turns, of the first                       {median / first:.1%}")
        print_parts(parts[1:])
    print(f"cached tokens of the last turn                  {turns[-1].num_cached_tokens}")
    print(f"tokens that came back from host memory          {stats.host_loaded_tokens}")
    print(f"the last turn, computed anew, was answered      {'alike' if is_alike else 'otherwise'}")
    return 0 if is_alike else 1


if __name__ == "__main__":
    sys.exit(main())

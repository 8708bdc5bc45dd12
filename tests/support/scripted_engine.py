"""An engine without models that acts out what the tests need; run as a script, the child process.

A sequence gets one token a step, 0, 1, 2, ... up to max_tokens, and holds one page as long as it
lives. A first prompt token from `SCRIPT` makes it do something worse.
"""

import os
import sys
import time
from typing import Any, cast

from outrider.engine.api import (
    EngineInfo,
    EngineStats,
    InvalidRequestError,
    NewRequest,
    QueueFullError,
    RequestOutput,
)
from outrider.engine.config import ConfigError, EngineConfig
from outrider.engine.lifeline import leave_at_once
from outrider.engine.processes import process

SCRIPT = {"invalid": 1, "submit_bug": 2, "step_bug": 3, "exit": 4, "leak": 5, "hang": 6}
STEP_S = 0.001


class ScriptedEngine:
    def __init__(self, config: EngineConfig, report: Any) -> None:
        if config.target.path == "missing":
            raise FileNotFoundError("no model in missing")
        if config.target.path == "refused":
            raise ConfigError("engine.something: no such thing")
        if config.target.path == "crash":
            os._exit(3)
        if config.target.path == "last words":
            leave_at_once("a rank is lost")
        if config.target.path.startswith("slow "):
            time.sleep(float(config.target.path.split()[1]))
        if config.target.path == "stands still":
            report("target", 3, 20)
            time.sleep(60)
        if config.target.path == "reads stdin":
            raise ValueError(f"stdin held {sys.stdin.read()!r}")
        report("target", 1, 1)
        self._capacity = config.scheduler.max_queue_len
        self._live: dict[str, tuple[NewRequest, int]] = {}
        self._generation_tokens = 0
        self._leaked = False
        self.info = EngineInfo(
            device="cpu",
            target_dtype="float32",
            batch_invariant=True,
            draft_dtype=None,
            vocab_size=100,
            max_model_len=1000,
            num_pages=10,
            page_size_tokens=16,
            cache_bytes=0,
            max_num_seqs=8,
            num_speculative_tokens=2,
            max_drafts=2,
            sources=(),
            proposer=None,
            load_s=0.0,
            warm_up_s=0.0,
            pid=os.getpid(),
        )

    def spare_s(self) -> float:
        return 0.0

    def submit(self, requests: list[NewRequest]) -> None:
        scripts = [request.prompt_token_ids[0] for request in requests]
        if SCRIPT["invalid"] in scripts:
            raise InvalidRequestError("an invalid prompt")
        if not self._live.keys().isdisjoint(request.request_id for request in requests):
            raise InvalidRequestError("an id is in use")
        if len(self._live) + len(requests) > self._capacity:
            raise QueueFullError("the queue is full")
        self._live |= {request.request_id: (request, 0) for request in requests}
        if SCRIPT["submit_bug"] in scripts:
            raise TypeError("a bug in submit")
        if SCRIPT["exit"] in scripts:
            os._exit(7)
        self._leaked |= SCRIPT["leak"] in scripts

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> list[RequestOutput]:
        time.sleep(STEP_S)
        outputs = []
        for request_id, (request, done) in list(self._live.items()):
            if request.prompt_token_ids[0] == SCRIPT["step_bug"]:
                raise ArithmeticError("a bug in step")
            if request.prompt_token_ids[0] == SCRIPT["hang"]:
                time.sleep(60)
            last = done + 1 == request.params.max_tokens
            self._live[request_id] = (request, done + 1)
            if last:
                del self._live[request_id]
            self._generation_tokens += 1
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    token_ids=[done],
                    finish_reason="length" if last else None,
                )
            )
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._live),
            pages_used=len(self._live),
            pages_total=10,
            generation_tokens=self._generation_tokens,
            drafted_per_position=[self._generation_tokens, 0],
        )

    def check_integrity(self) -> None:
        if self._leaked:
            raise RuntimeError("a page leaked")


if __name__ == "__main__":
    process._QUIET_S = 0.1
    sys.exit(process.main(cast(Any, ScriptedEngine)))

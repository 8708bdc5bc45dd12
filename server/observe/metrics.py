"""GET /metrics: counts and times of the server, and the engine's own statistics."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from outrider.engine.api import STEP_TOKENS
from outrider.engine.processes.client import EngineClient

from .vllm_names import VLLMNames

TOKEN_TIMES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0)
FIRST_TOKEN_TIMES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUEST_TIMES_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_TIMES_S = (0.001, 0.01, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0)
TOKEN_COUNTS = tuple(float(n * 10**i) for i in range(6) for n in (1, 2, 5))


class Metrics:
    """Has its own registry, so that several servers can live in one process.

    If prometheus-client counts for several processes (PROMETHEUS_MULTIPROC_DIR), each of them
    reports the counts of all.
    """

    def __init__(self, client: EngineClient, model_name: str) -> None:
        own = CollectorRegistry()
        self.registry = own
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self.registry = CollectorRegistry()
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
        self.requests = Counter(
            "outrider_requests",
            "Requests answered, by outcome: ok, invalid (4xx), unavailable (429, 503), error, "
            "disconnected (the client left).",
            ["path", "outcome"],
            registry=own,
        )
        self.failed_keys = Counter(
            "outrider_failed_keys",
            "Requests without one of the keys, on any route: missing or wrong; probes need none, "
            "and count if theirs is wrong.",
            ["reason"],
            registry=own,
        )
        self.request_time = Histogram(
            "outrider_request_duration_seconds",
            "From a request's arrival to the end of its answer, of those with outcome ok.",
            ["path"],
            registry=own,
            buckets=REQUEST_TIMES_S,
        )
        self.time_to_first_token = Histogram(
            "outrider_time_to_first_token_seconds",
            "From submission to a sequence's first token.",
            registry=own,
            buckets=FIRST_TOKEN_TIMES_S,
        )
        self.inter_token_latency = Histogram(
            "outrider_inter_token_latency_seconds",
            "Time between steps of a sequence, divided by the tokens that the step brought.",
            registry=own,
            buckets=TOKEN_TIMES_S,
        )
        self._of_requests = {
            fact: Histogram(f"outrider_request_{name}", text, registry=own, buckets=buckets)
            for fact, name, text, buckets in (
                ("prompt_tokens", "prompt_tokens", "Prompt tokens of a request.", TOKEN_COUNTS),
                ("completion_tokens", "generation_tokens", "Its tokens generated.", TOKEN_COUNTS),
                (
                    "max_generation_tokens",
                    "max_generation_tokens",
                    "Tokens generated for its longest sequence.",
                    TOKEN_COUNTS,
                ),
                ("max_tokens", "max_tokens", "Most tokens of a sequence of it.", TOKEN_COUNTS),
                (
                    "token_s",
                    "time_per_token_seconds",
                    "Between two tokens of its sequences, on average.",
                    TOKEN_TIMES_S,
                ),
                ("queue_s", "queue_time_seconds", "Its time in the queue.", QUEUE_TIMES_S),
                (
                    "prefill_s",
                    "prefill_time_seconds",
                    "From its first step to its first token.",
                    FIRST_TOKEN_TIMES_S,
                ),
                (
                    "decode_s",
                    "decode_time_seconds",
                    "From its first token to the end of its answer.",
                    REQUEST_TIMES_S,
                ),
                (
                    "inference_s",
                    "inference_time_seconds",
                    "From its first step to the end of its answer.",
                    REQUEST_TIMES_S,
                ),
            )
        }
        self.sequences_ended = Counter(
            "outrider_sequences_ended",
            "Sequences that came to an end, by its reason: stop, length, abort, error.",
            ["finished_reason"],
            registry=own,
        )
        self.registry.register(_EngineCollector(client))
        self._vllm = CollectorRegistry()
        self._vllm.register(VLLMNames(self.registry, client, model_name))

    def observe(self, facts: Mapping[str, Any]) -> None:
        """Count the facts of a request's log line, if it generated anything."""
        measured = dict(facts)
        if "first_token_s" in facts:
            measured["prefill_s"] = max(0.0, facts["first_token_s"] - facts["queue_s"])
            measured["decode_s"] = max(0.0, facts["duration_s"] - facts["first_token_s"])
            measured["inference_s"] = measured["prefill_s"] + measured["decode_s"]
        for fact, histogram in self._of_requests.items():
            if fact in measured:
                histogram.observe(measured[fact])

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry) + generate_latest(self._vllm)


def _of_lengths(
    name: str, text: str, drafted: Sequence[int], reaching: Sequence[int]
) -> HistogramMetricFamily:
    """A histogram of tokens a step, computed from how often a step had an i-th token."""
    num_steps = sum(drafted[:1])
    buckets = [(str(float(i)), num_steps - beyond) for i, beyond in enumerate(reaching)]
    buckets += [(str(float(len(reaching))), num_steps), ("+Inf", num_steps)]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=sum(reaching))


class _EngineCollector(Collector):
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        for name, (text, value) in self._gauges().items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, count) in self._counters().items():
            yield CounterMetricFamily(name, text, value=count)
        yield from self._of_steps()

    def _gauges(self) -> dict[str, tuple[str, float]]:
        """By name: a description, and the value now."""
        stats, info = self._client.stats, self._client.info
        return {
            "outrider_engine_ready": ("1 while the engine answers.", self._client.state == "ready"),
            "outrider_tensor_parallel": (
                "Processes that share the target, each with a device.",
                info.tensor_parallel if info is not None else 1,
            ),
            "outrider_draft_share_of_text": (
                "Of the target's tokens in ordinary text, those that the draft has, too: 0 to 1.",
                1.0 if info is None or info.share_of_text is None else info.share_of_text,
            ),
            "outrider_requests_running": ("Sequences in the batch.", stats.num_running),
            "outrider_requests_waiting": ("Sequences in the queue.", stats.num_waiting),
            "outrider_pages_used": ("KV cache pages held by live sequences.", stats.pages_used),
            "outrider_pages_total": ("KV cache pages there are.", stats.pages_total),
            "outrider_kv_cache_usage_ratio": (
                "KV cache pages held by live sequences, of those there are: 0 to 1.",
                stats.pages_used / max(1, stats.pages_total),
            ),
            "outrider_host_pages_used": (
                "Cached pages in host memory (cache.host_gib).",
                stats.host_pages_used,
            ),
            "outrider_host_pages_total": (
                "Pages that fit there; 0: it is off, or has failed.",
                stats.host_pages_total,
            ),
        }

    def _counters(self) -> dict[str, tuple[str, int]]:
        """By name: a description, and the count since the engine started."""
        stats = self._client.stats
        drafted, accepted = stats.drafted_per_position, stats.accepted_per_position
        return {
            "outrider_prompt_tokens": ("Prompt tokens taken in.", stats.prompt_tokens),
            "outrider_cached_prompt_tokens": (
                "Prompt tokens found in the prefix cache.",
                stats.cached_tokens,
            ),
            "outrider_host_saved_tokens": (
                "Cached tokens copied to host memory.",
                stats.host_saved_tokens,
            ),
            "outrider_host_loaded_tokens": (
                "Cached tokens copied back from host memory.",
                stats.host_loaded_tokens,
            ),
            "outrider_generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "outrider_steps": ("Steps of the engine.", stats.steps),
            "outrider_preemptions": (
                "Sequences preempted because pages ran out.",
                stats.preemptions,
            ),
            "outrider_drafts": ("Times that a sequence was drafted for.", sum(drafted[:1])),
            "outrider_draft_tokens": ("Tokens drafted.", sum(drafted)),
            "outrider_accepted_tokens": ("Drafted tokens accepted.", sum(accepted)),
            "outrider_dead_drafts": (
                "Times that fewer than 5% of 2,000 drafts of a model were accepted.",
                stats.dead_drafts,
            ),
        }

    def _of_steps(self) -> Iterator[Metric]:
        """What steps had: drafts, those accepted, in all and by position, and tokens."""
        stats = self._client.stats
        drafted, accepted = stats.drafted_per_position, stats.accepted_per_position
        for name, text, counts in (
            ("outrider_step_draft_tokens", "Tokens drafted for a sequence in a step (k).", drafted),
            ("outrider_step_accepted_tokens", "Tokens of these that were accepted.", accepted),
        ):
            text += " Steps without drafts are not counted."
            yield _of_lengths(name, text, drafted, counts)
        bounds = [*map(str, map(float, STEP_TOKENS)), "+Inf"]
        yield HistogramMetricFamily(
            "outrider_step_tokens",
            "Tokens of a step: those of prompts that it computed, and those that it generated.",
            buckets=list(zip(bounds, accumulate(stats.steps_by_tokens), strict=False)),
            sum_value=stats.step_tokens,
        )
        for name, text, counts in (
            ("outrider_draft_tokens_per_position", "Tokens drafted, by position.", drafted),
            (
                "outrider_accepted_tokens_per_position",
                "Drafted tokens accepted, by position.",
                accepted,
            ),
        ):
            family = CounterMetricFamily(name, text, labels=["position"])
            for position, count in enumerate(counts):
                family.add_metric([str(position)], count)
            yield family

"""Times in answers, for those who ask, and what /metrics shows of them."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from asgi import get, post
from prometheus_client.parser import text_string_to_metric_families
from scripted_client import steps
from served import Served

from outrider.engine.api import STEP_TOKENS, EngineStats, NewRequest, RequestOutput
from outrider.server.api import generation

Serve = Callable[..., Served]

HI = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}
EACH = {  # steps after 1, 2 and 3 s, of which the first half was in the queue
    "time_to_first_token_ms": 500.0,
    "generation_time_ms": 2000.0,
    "queue_time_ms": 500.0,
    "mean_itl_ms": 500.0,
    "tokens_per_second": 2.0,
}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which each look takes a second."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(
        generation, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    )


def play(request: NewRequest) -> list[RequestOutput]:
    outputs = steps(request, [70] * 5, sizes=(1, 2, 2), finish="length", num_drafts=1)
    return [replace(output, queue_s=0.5) for output in outputs]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_answers_have_the_times_of_vllm(serve: Serve, path: str, stream: bool) -> None:
    served = serve(play)
    body = PATHS[path] | {"metrics": True, "stream": stream}
    if stream and "completions" in path:
        body["stream_options"] = {"include_usage": True}
    reply = post(served.app, body, path=path)
    if not stream:
        metrics = reply.json()["metrics"]
    elif path == "/v1/messages":
        metrics = reply.named_events[-2]["metrics"]
    elif path == "/v1/responses":
        metrics = reply.named_events[-1]["response"]["metrics"]
    else:
        metrics = reply.chunks[-1]["metrics"]
    assert metrics == EACH


def test_times_are_beside_what_became_of_the_drafts(serve: Serve) -> None:
    body = {"prompt": "Hi", "metrics": True, "speculation": {"metrics": True}}
    metrics = post(serve(play).app, body).json()["metrics"]
    assert metrics.pop("speculative_decoding")["num_draft_tokens"] == 3
    assert metrics == EACH


def test_a_single_token_has_no_time_between_tokens(serve: Serve) -> None:
    served = serve(lambda request: [replace(*steps(request, [70]), queue_s=0.5)])
    metrics = post(served.app, {"prompt": "Hi", "metrics": True}).json()["metrics"]
    assert (metrics["mean_itl_ms"], metrics["generation_time_ms"]) == (None, 0.0)
    assert metrics["tokens_per_second"] == 2.0


def test_times_of_several_sequences_are_those_of_all(serve: Serve) -> None:
    metrics = post(serve(play).app, {"prompt": "Hi", "n": 2, "metrics": True}).json()["metrics"]
    # Steps of the two take turns: at 1, 3 and 5 s, and at 2, 4 and 6 s.
    assert metrics == {
        "time_to_first_token_ms": 500.0,
        "generation_time_ms": 5000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 1000.0,
        "tokens_per_second": round(10 / 5.5, 3),
    }


def test_times_come_unasked_only_if_the_server_says_so(serve: Serve) -> None:
    assert "metrics" not in post(serve(play).app, {"prompt": "Hi"}).json()
    served = serve(play, request_metrics=True)
    assert post(served.app, {"prompt": "Hi"}).json()["metrics"] == EACH
    assert "metrics" not in post(served.app, {"prompt": "Hi", "metrics": False}).json()


def samples(served: Served) -> dict[str, float]:
    """The values of series without further labels, and of whole histograms."""
    reported = {}
    for family in text_string_to_metric_families(get(served.app, "/metrics").body.decode()):
        for sample in family.samples:
            le = f":{sample.labels['le']}" if "le" in sample.labels else ""
            reported[sample.name + le] = sample.value
    return reported


def test_metrics_have_the_rest_of_vllms_names(serve: Serve) -> None:
    served = serve(play)
    served.client.stats = EngineStats(
        step_tokens=1000, steps_by_tokens=[5, 3, *[0] * (len(STEP_TOKENS) - 2), 1]
    )
    assert post(served.app, {"prompt": "Hi", "n": 2}).status == 200
    reported = samples(served)
    assert reported["vllm:request_time_per_output_token_seconds_sum"] == 1.0
    assert reported["vllm:request_time_per_output_token_seconds_count"] == 1
    assert reported["vllm:request_max_num_generation_tokens_sum"] == 5
    assert reported["vllm:iteration_tokens_total_sum"] == 1000
    assert reported["vllm:iteration_tokens_total_count"] == 9
    assert reported["vllm:iteration_tokens_total_bucket:1.0"] == 5
    assert reported["vllm:iteration_tokens_total_bucket:8.0"] == 8
    assert reported["vllm:iteration_tokens_total_bucket:16384.0"] == 8
    assert reported["vllm:iteration_tokens_total_bucket:+Inf"] == 9

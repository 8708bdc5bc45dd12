"""What routers and dashboards made for other engines read here."""

from collections.abc import Callable

import pytest
from asgi import Reply, get, post
from prometheus_client.parser import text_string_to_metric_families
from served import Served
from starlette.types import Receive, Scope, Send

from outrider.engine.api import EngineStats

Serve = Callable[..., Served]

BUSY = EngineStats(
    num_running=3,
    num_waiting=2,
    pages_used=4,
    pages_total=10,
    prompt_tokens=200,
    cached_tokens=50,
    generation_tokens=100,
    preemptions=1,
    drafted_per_position=[10, 8],
    accepted_per_position=[7, 4],
)
VLLM = {"model_name": "test-model", "engine": "0"}


@pytest.fixture
def busy(serve: Serve) -> Served:
    served = serve(api_keys=("one",), metrics_port=9000)
    served.client.stats = BUSY
    return served


KEY = {"authorization": "Bearer one"}


def test_loads_has_what_smg_reads(busy: Served) -> None:
    answer = get(busy.app, "/v1/loads", KEY).json()
    (load,) = answer.pop("loads")
    assert answer.keys() == {"timestamp", "dp_rank_count"}
    assert load == {
        "dp_rank": 0,
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "num_total_reqs": 5,
        "num_used_tokens": 64,
        "max_total_num_tokens": 160,
        "token_usage": 0.4,
        "cache_hit_rate": 0.25,
        "max_running_requests": 8,
    }


def test_get_load_has_what_vllm_router_reads(busy: Served) -> None:
    assert get(busy.app, "/get_load", KEY).json() == {"load": 5}


def test_load_is_reported_as_vllm_does(busy: Served) -> None:
    assert get(busy.app, "/load", KEY).json() == {"server_load": 5}


def test_an_engine_that_was_never_up_has_no_load(serve: Serve) -> None:
    served = serve()
    served.client.info = None
    (load,) = get(served.app, "/v1/loads").json()["loads"]
    assert not any(load.values())


def test_polling_for_loads_is_no_request_to_be_counted(busy: Served) -> None:
    get(busy.app, "/v1/loads", KEY)
    assert b"outrider_requests_total{" not in get(busy.app, "/metrics", KEY).body


def series(reply: Reply | str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = reply if isinstance(reply, str) else reply.body.decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_have_the_names_that_dashboards_of_vllm_use(busy: Served) -> None:
    assert post(busy.app, {"prompt": "Hi", "max_tokens": 2}, KEY).status == 200
    found = series(get(busy.app, "/metrics", KEY))

    def value(name: str, **labels: str) -> float:
        return found["vllm:" + name, frozenset((VLLM | labels).items())]

    assert value("num_requests_running") == 3
    assert value("num_requests_waiting") == 2
    assert value("kv_cache_usage_perc") == 0.4
    assert value("num_preemptions_total") == 1
    assert value("prompt_tokens_total") == value("prefix_cache_queries_total") == 200
    assert value("prefix_cache_hits_total") == 50
    assert value("generation_tokens_total") == 100
    assert value("spec_decode_num_drafts_total") == 10
    assert value("spec_decode_num_draft_tokens_total") == 18
    assert value("spec_decode_num_accepted_tokens_total") == 11
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 4
    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_latency_seconds_bucket", le="+Inf") == 1
    assert value("request_queue_time_seconds_sum") == 0
    assert value("request_prompt_tokens_sum") == 2
    assert value("request_generation_tokens_bucket", le="1.0") == 0
    assert value("request_generation_tokens_bucket", le="2.0") == 1
    assert value("request_params_max_tokens_sum") == 2
    assert value("request_success_total", finished_reason="length") == 1
    parts = [value(f"request_{part}_time_seconds_sum") for part in ("prefill", "decode")]
    assert value("request_inference_time_seconds_sum") == pytest.approx(sum(parts))
    assert value("request_prefill_time_seconds_count") == 1
    assert value("cache_config_info", block_size="16", num_gpu_blocks="10") == 1


def test_requests_that_generate_are_timed_under_vllms_name(busy: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    bodies = {
        "/v1/completions": {"prompt": "Hi"},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "Hi"},
    }
    for path, body in bodies.items():
        assert post(busy.app, body, KEY, path=path).status == 200
    assert post(busy.app, chat, KEY, path="/v1/messages/count_tokens").status == 200
    found = series(get(busy.app, "/metrics", KEY))
    ends = [key for key in found if key[0] == "vllm:e2e_request_latency_seconds_count"]
    assert {dict(labels)["path"] for _, labels in ends} == bodies.keys()


def test_metrics_port_asks_for_no_key_and_serves_nothing_else(busy: Served) -> None:
    def on_port(port: int, path: str, host: str = "127.0.0.1") -> Reply:
        async def at_port(scope: Scope, receive: Receive, send: Send) -> None:
            await busy.app(scope | {"server": ("test", port)}, receive, send)

        return get(at_port, path, {"host": f"{host}:{port}"})

    assert b"vllm:num_requests_running" in on_port(9000, "/metrics").body
    assert on_port(9000, "/metrics", "evil.example").status == 403
    assert on_port(8000, "/metrics").status == 401
    for path in ("/v1/models", "/health", "/openapi.json"):
        assert on_port(9000, path).status == 404
    assert on_port(8000, "/health").status == 200

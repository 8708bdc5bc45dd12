"""What answers report of their drafts, for those who ask."""

from collections.abc import Callable
from typing import Any

import pytest
from asgi import post
from scripted_client import steps
from served import Served

Serve = Callable[..., Served]
ASK = {"prompt": "Hi", "speculation": {"metrics": True}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def play(request: Any) -> Any:
    return steps(request, [70] * 9, sizes=(3, 1, 5), num_drafts=4)


def test_metrics_have_the_shape_of_vllm_and_add_up(serve: Serve) -> None:
    metrics = post(serve(play).app, ASK).json()["metrics"]["speculative_decoding"]
    assert metrics == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 0, 1, 0, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 12,
        "num_spec_tokens": 4,
    }


def test_stream_returns_them_with_its_usage(serve: Serve) -> None:
    served = serve(play)
    *chunks, last = post(served.app, ASK | STREAM).chunks
    assert last["metrics"] == post(served.app, ASK).json()["metrics"]
    assert all("metrics" not in chunk for chunk in chunks)


@pytest.mark.parametrize("fields", [{"n": 3}, {"prompt": ["a", "b", "c"]}, {"best_of": 3}])
def test_several_sequences_are_counted_together(serve: Serve, fields: Any) -> None:
    metrics = post(serve(play).app, ASK | fields).json()["metrics"]["speculative_decoding"]
    assert metrics == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [3, 0, 3, 0, 3],
        "num_spec_steps": 9,
        "num_accepted_draft_tokens": 18,
        "num_draft_tokens": 36,
        "num_spec_tokens": 4,
    }


@pytest.mark.parametrize("fields", [{"speculation": {}}, {"speculation": None}])
def test_nothing_is_returned_unasked(serve: Serve, fields: Any) -> None:
    assert "metrics" not in post(serve(play).app, ASK | fields).json()


def test_zeros_are_returned_where_nothing_was_drafted(serve: Serve) -> None:
    served = serve()
    metrics = post(served.app, ASK).json()["metrics"]["speculative_decoding"]
    k = metrics["num_spec_tokens"]
    assert k > 0
    assert metrics == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0] * (k + 1),
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
        "num_spec_tokens": k,
    }
    *_, last = post(served.app, ASK | STREAM).chunks
    assert last["metrics"] == {"speculative_decoding": metrics}


def test_server_can_return_them_unless_declined(serve: Serve) -> None:
    served = serve(play, speculation_metrics=True)
    assert "metrics" in post(served.app, {"prompt": "Hi"}).json()
    decline = {"prompt": "Hi", "speculation": {"metrics": False}}
    assert "metrics" not in post(served.app, decline).json()


def test_obfuscated_events_do_not_show_how_many_tokens_a_step_brought(serve: Serve) -> None:
    served = serve(play)
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    *events, _ = post(served.app, ASK | options).events
    assert len({len(event) % 256 for event in events}) == 1
    chunks = post(served.app, ASK | options).chunks
    assert len({chunk["obfuscation"] for chunk in chunks}) == len(chunks)
    assert "obfuscation" not in post(served.app, ASK | {"stream": True}).chunks[0]

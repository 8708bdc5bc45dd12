"""What a request gets that leaves sampling parameters out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asgi import get, post
from served import Served

from outrider.engine.api import SamplingParams
from outrider.server.api.sampling_defaults import NEUTRAL, SamplingDefaults, sampling_defaults
from outrider.server.models.store import ModelError

Serve = Callable[..., Served]
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


def write(folder: Path, **content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def params_of(served: Served, path: str = "/v1/completions", **fields: Any) -> SamplingParams:
    prompt: dict[str, Any] = (
        {"prompt": "Hi"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    reply = post(served.app, prompt | fields, path=path)
    assert reply.status == 200, reply.body
    return served.client.submitted[-1][0].params


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_requests_get_what_the_model_recommends_unless_they_say_otherwise(
    serve: Serve, tmp_path: Path, path: str
) -> None:
    served = serve(sampling_defaults=sampling_defaults("auto", write(tmp_path, **QWEN)))
    params = params_of(served, path)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert (params.min_p, params.repetition_penalty) == (0, 1)
    params = params_of(served, path, temperature=0, top_k=-1, top_p=None)
    assert (params.temperature, params.top_k, params.top_p) == (0, 0, 0.95)


def test_the_length_of_a_chat_is_bounded_as_the_model_recommends(serve: Serve) -> None:
    chat = "/v1/chat/completions"
    served = serve(sampling_defaults=SamplingDefaults(max_new_tokens=5))
    assert params_of(served, chat).max_tokens == 5
    assert params_of(served, chat, max_completion_tokens=9).max_tokens == 9
    assert params_of(served).max_tokens == 16  # OpenAI's own default of completions
    large = serve(sampling_defaults=SamplingDefaults(max_new_tokens=10**6))
    assert params_of(large, chat).max_tokens < 1000  # what the context has room for


def test_outrider_means_neutral_ones_and_a_directory_for_its_own(tmp_path: Path) -> None:
    write(tmp_path, **QWEN)
    assert sampling_defaults("outrider", tmp_path) == NEUTRAL
    other = tmp_path / "other"
    other.mkdir()
    assert sampling_defaults("auto", other) == NEUTRAL
    with pytest.raises(ModelError, match=r"there is no .*other/generation_config\.json"):
        sampling_defaults(str(other), tmp_path)
    write(other, temperature=0.1, top_k=None)
    assert sampling_defaults(str(other), tmp_path) == SamplingDefaults(temperature=0.1)


@pytest.mark.parametrize(
    "content", ['{"temperature": -1}', '{"top_p": "high"}', "{", "[]", '{"temperature": NaN}']
)
def test_a_broken_file_is_named_with_the_way_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json cannot .*config outrider"):
        sampling_defaults("auto", tmp_path)


def test_a_model_goes_by_all_of_its_names(serve: Serve) -> None:
    served = serve(served_model_name=("first", "second"))
    listed = get(served.app, "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["first", "second"]
    for name in ("first", "second"):
        assert get(served.app, f"/v1/models/{name}").json()["id"] == name
        reply = post(served.app, {"prompt": "Hi", "model": name})
        assert reply.json()["model"] == "first"
    assert post(served.app, {"prompt": "Hi", "model": "third"}).status == 404


@pytest.mark.parametrize(
    ("names", "own"), [(("*",), "smollm2-135m-instruct"), (("*", "first"), "first")]
)
def test_a_model_can_go_by_any_name(serve: Serve, names: tuple[str, ...], own: str) -> None:
    served = serve(served_model_name=names)
    assert [model["id"] for model in get(served.app, "/v1/models").json()["data"]] == [own]
    assert get(served.app, "/v1/models/gpt-5").json()["root"] == own
    reply = post(served.app, {"prompt": "Hi", "model": "gpt-5"})
    assert (reply.status, reply.json()["model"]) == (200, own)

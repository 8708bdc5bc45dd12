"""`logprob_token_ids`: the logprobs of tokens that the client names."""

from collections.abc import Callable
from typing import Any

import pytest
from asgi import post
from scripted_client import steps
from served import Served

Serve = Callable[..., Served]

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
TEXT = {"prompt": "Hi", "logprobs": 0}
IDS = [72, 70]
A70, A71, A72 = (-0.5 - i / 1000 for i in (70, 71, 72))  # as the script has them


def asked(served: Served, body: dict[str, Any], **fields: Any) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return post(served.app, body | fields, path=path)


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(lambda request: steps(request, [70, 71]), unknown_fields="refuse")


@pytest.mark.parametrize("top", [{}, {"top_logprobs": 5}])
def test_a_chat_lists_them_in_place_of_the_best(served: Served, top: dict[str, Any]) -> None:
    fields = {"logprob_token_ids": IDS, "return_tokens_as_token_ids": True}
    (choice,) = asked(served, CHAT, **fields, **top).json()["choices"]
    first, second = choice["logprobs"]["content"]
    for entry in (first, second):
        named = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
        assert named == [("token_id:72", A72), ("token_id:70", A70)]
    assert (first["logprob"], second["logprob"]) == (A70, A71)
    streamed = asked(served, CHAT, stream=True, **fields).chunks
    reported = [c["logprobs"] for chunk in streamed for c in chunk["choices"] if c["logprobs"]]
    assert [entry for each in reported for entry in each["content"]] == [first, second]


def test_a_completion_lists_them_beside_the_token(served: Served) -> None:
    fields = {"logprob_token_ids": IDS, "return_tokens_as_token_ids": True}
    (choice,) = asked(served, TEXT, **fields).json()["choices"]
    first, second = choice["logprobs"]["top_logprobs"]
    assert first == {"token_id:70": A70, "token_id:72": A72}
    assert second == {"token_id:71": A71, "token_id:72": A72, "token_id:70": A70}
    # The tokens of an echoed prompt have the best ones, as before.
    (choice,) = asked(served, TEXT, prompt=[80, 81], echo=True, **fields).json()["choices"]
    assert [len(each or ()) for each in choice["logprobs"]["top_logprobs"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprobs": None}, "needs logprobs"),
        ({"logprob_token_ids": []}, "must not be empty"),
        ({"logprob_token_ids": [100_000]}, "out of vocabulary"),
        ({"logprob_token_ids": [-1]}, "greater than or equal to 0"),
        ({"logprob_token_ids": [70] * 21}, "server.max_logprobs"),
        ({"logprob_token_ids": [70] * 129}, "at most 128"),
        ({"logprob_token_ids": "70"}, "valid list"),
    ],
)
@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_what_cannot_be_reported_is_refused(
    served: Served, body: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    reply = asked(served, body, **{"logprob_token_ids": IDS} | fields)
    assert (reply.status, reply.error["param"]) == (400, "logprob_token_ids")
    assert words in reply.error["message"]
    assert not served.client.submitted


def test_they_count_as_alternatives_before_anything_is_allocated(serve: Serve) -> None:
    served = serve(max_answer_bytes=2**20, max_logprobs=128)
    few = asked(served, TEXT, max_tokens=900, logprob_token_ids=[70])
    assert few.status == 400  # 900 tokens of some 1.8 KB
    assert asked(served, TEXT, max_tokens=16, logprob_token_ids=[70] * 100).status == 200
    many = asked(served, TEXT, max_tokens=40, logprob_token_ids=[70] * 100)
    assert (many.status, "max_answer_bytes" in many.error["message"]) == (400, True)
    assert asked(served, TEXT, max_tokens=40, logprob_token_ids=[70]).status == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_apis_that_have_no_such_field_refuse_it(serve: Serve, path: str) -> None:
    body = {"input": "Hi"} if path == "/v1/responses" else {**CHAT, "max_tokens": 9}
    body.pop("logprobs", None)
    reply = post(serve().app, body | {"logprob_token_ids": IDS}, path=path)
    assert reply.status == 400
    assert "logprob_token_ids is not supported" in reply.error["message"]

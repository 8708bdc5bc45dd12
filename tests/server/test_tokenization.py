"""/tokenize, /detokenize and /tokenizer_info."""

from collections.abc import Callable
from typing import Any

import pytest
from asgi import get, post
from served import Served
from tokenizers import processors
from tokenizers_for_tests import BOS, CHAT_TEMPLATE, byte_level_tokenizer

from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]
TEXT = "Hello 🙂"
HI = [{"role": "user", "content": "Hi"}]


def test_prompt_becomes_tokens(serve: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=True)
    reply = post(serve().app, {"prompt": TEXT}, path="/tokenize")
    assert reply.json() == {
        "count": len(ids),
        "max_model_len": 1000,
        "tokens": ids,
        "token_strs": None,
    }


def test_tokens_come_as_the_vocabulary_writes_them_when_asked_for(serve: Serve) -> None:
    body = {"prompt": " world", "return_token_strs": True}
    answer = post(serve().app, body, path="/tokenize").json()
    assert "".join(answer["token_strs"]) == "Ġworld"
    assert len(answer["token_strs"]) == answer["count"]


def test_special_tokens_are_added_to_a_prompt_and_not_to_a_chat() -> None:
    tokenizer = byte_level_tokenizer()
    bos = tokenizer.backend.token_to_id(BOS)
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos)]
    )
    served = Served(lambda request: [], tokenizer)

    def starts_with_bos(**body: Any) -> bool:
        tokens: list[int] = post(served.app, body, path="/tokenize").json()["tokens"]
        return tokens[0] == bos

    assert starts_with_bos(prompt="Hi")
    assert not starts_with_bos(prompt="Hi", add_special_tokens=False)
    assert not starts_with_bos(messages=HI)
    assert starts_with_bos(messages=HI, add_special_tokens=True)


def test_messages_become_the_tokens_that_a_chat_completion_has(serve: Serve) -> None:
    served = serve()
    body = {"messages": HI, "chat_template_kwargs": {"mood": "glad"}}
    post(served.app, body, path="/v1/chat/completions")
    answer = post(served.app, body, path="/tokenize").json()
    assert answer["tokens"] == served.client.submitted[0][0].prompt_token_ids


def test_tokens_become_text_again(serve: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"{TEXT}<eos>", add_special_tokens=False)
    reply = post(serve().app, {"tokens": ids}, path="/detokenize")
    assert reply.json() == {"prompt": f"{TEXT}<eos>"}
    assert post(serve().app, {"tokens": []}, path="/detokenize").json() == {"prompt": ""}


def test_tokenizer_shows_its_special_tokens_and_template(serve: Serve) -> None:
    info = get(serve().app, "/tokenizer_info").json()
    assert info["eos_token"] == "<eos>"
    assert info["chat_template"] == CHAT_TEMPLATE
    assert info["model_max_length"] == 1000
    assert info["tokenizer_class"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "Hi", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "nurse", "content": "Hi"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_unusable_field_is_named(serve: Serve, path: str, body: Any, param: str) -> None:
    reply = post(serve().app, body, path=path)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [1]})]
)
def test_unknown_model_is_404_and_a_missing_engine_503(serve: Serve, path: str, body: Any) -> None:
    served = serve()
    assert post(served.app, body | {"model": "gpt-5"}, path=path).status == 404
    served.client.info = None
    assert post(served.app, body, path=path).status == 503


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, byte_fallback: Tokenizer) -> None:
    ids = tokenizer.encode(f"{TEXT} naïve<eos>", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == f"{TEXT} naïve<eos>"
    for piece, expected in {"<0xF0>": b"\xf0", "ñ": "ñ".encode()}.items():
        assert byte_fallback.token_bytes(byte_fallback.backend.token_to_id(piece)) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * 5_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 5_000}]}),
        ("/v1/completions", {"prompt": "a" * 5_000, "truncate_prompt_tokens": 4}),
    ],
)
def test_a_text_is_counted_before_it_is_encoded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    served = serve(max_answer_bytes=1024 * 1024)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    reply = post(served.app, body, path=path)
    assert reply.status == 400
    assert "server.max_answer_bytes" in reply.error["message"]

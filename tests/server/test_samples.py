"""Samples of a prompt: several, the best of several, scored, truncated, without text."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from asgi import post
from scripted_client import steps
from served import Served
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from tokenizers_for_tests import EOS, tokenizer_of
from transformers import PreTrainedTokenizerFast

from outrider.engine.api import NewRequest, RequestOutput, TokenLogprobs
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def sample_index(request: NewRequest) -> int:
    return int(request.request_id.rpartition("-")[2])


def of_logprob(request: NewRequest) -> list[RequestOutput]:
    """Sample i says its number, i + 1 tokens of it, each of a logprob that is best for sample 2."""
    i = sample_index(request)
    return [
        RequestOutput(
            request_id=request.request_id,
            token_ids=[48 + i] * (i + 1),
            logprobs=[TokenLogprobs(-1.0 - abs(i - 2), [])] * (i + 1),
            finish_reason="length",
        )
    ]


def test_best_of_gives_the_samples_of_the_highest_mean_logprob(serve: Serve) -> None:
    served = serve(of_logprob)
    token = served.tokenizer.token_text
    body = {"prompt": [[70], [71]], "n": 2, "best_of": 4}
    answer = post(served.app, body).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, token(50) * 3),
        (1, token(49) * 2),
        (2, token(52) * 5),  # all of the second prompt are worse than its first
        (3, token(53) * 6),
    ]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == sum(range(1, 9))
    (requests,) = served.client.submitted
    assert len({request.params.seed for request in requests[:4]}) == 4
    assert len(requests) == 8


def test_prompt_logprobs_have_the_shape_of_vllm(serve: Serve) -> None:
    served = serve()
    text = served.tokenizer.token_text
    expected = [
        None,
        {
            "71": {"logprob": -0.571, "rank": 1, "decoded_token": text(71)},
            "72": {"logprob": -1.571, "rank": 2, "decoded_token": text(72)},
        },
    ]
    body = {"prompt": [70, 71], "prompt_logprobs": 2, "n": 2}
    answer = post(served.app, body).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    (unasked,) = post(served.app, {"prompt": [70, 71]}).json()["choices"]
    assert unasked["prompt_logprobs"] is None


def test_prompt_logprobs_of_a_chat_are_beside_its_choices(serve: Serve) -> None:
    answer = post(serve().app, CHAT | {"prompt_logprobs": 1}, path="/v1/chat/completions").json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(
    serve: Serve, tokenizer: Tokenizer, max_tokens: int, stream: bool
) -> None:
    prompt = "naïve café 🙂 one"
    ids = tokenizer.encode(prompt, add_special_tokens=True)

    def play(request: NewRequest) -> list[RequestOutput]:
        if request.params.max_tokens:
            return steps(request, [70])
        [scored] = steps(request, [70])
        return [
            RequestOutput(
                request_id=request.request_id,
                token_ids=[],
                prompt_logprobs=scored.prompt_logprobs,
                finish_reason="length",
            )
        ]

    body = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    reply = post(serve(play).app, body | {"stream": stream})
    (choice,) = (reply.chunks[0] if stream else reply.json())["choices"]
    new = tokenizer.token_text(70) * max_tokens
    assert (choice["text"], choice["finish_reason"]) == (prompt + new, "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(i) for i in ids + [70] * max_tokens]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    scored = logprobs["token_logprobs"][1:]
    assert scored == [-0.5 - i / 1000 for i in (ids + [70] * max_tokens)[1:]]
    for own, top in zip(scored, logprobs["top_logprobs"][1:], strict=True):
        assert own == max(top.values())
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[len(ids) :] == [len(prompt)] * max_tokens
    assert prompt[offsets[-1 - max_tokens] :] == tokenizer.token_text(ids[-1])


def test_a_scored_prompt_without_new_tokens_costs_none(serve: Serve) -> None:
    def play(request: NewRequest) -> list[RequestOutput]:
        return [RequestOutput(request_id=request.request_id, token_ids=[], finish_reason="length")]

    served = serve(play)
    answer = post(served.app, {"prompt": [70], "max_tokens": 0, "echo": True}).json()
    assert answer["choices"][0]["text"] == served.tokenizer.token_text(70)
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [
        (2, "left", [72, 73]),
        (2, "right", [70, 71]),
        (9, "left", [70, 71, 72, 73]),
        (-1, None, [70, 71, 72, 73]),
    ],
)
def test_a_prompt_keeps_its_last_tokens_or_its_first(
    serve: Serve, limit: int, side: str, kept: list[int]
) -> None:
    served = serve()
    body = {"prompt": [70, 71, 72, 73], "truncate_prompt_tokens": limit, "echo": True}
    body["truncation_side"] = side
    answer = post(served.app, body).json()
    assert served.client.submitted[0][0].prompt_token_ids == kept
    assert answer["usage"]["prompt_tokens"] == len(kept)
    assert answer["choices"][0]["text"].startswith("".join(map(served.tokenizer.token_text, kept)))


def test_a_prompt_is_cut_to_what_fits(serve: Serve) -> None:
    served = serve()
    body = {"prompt": [70] * 5000, "truncate_prompt_tokens": -1, "max_tokens": 100}
    assert post(served.app, body).status == 200
    chat = {"messages": [{"role": "user", "content": "x " * 5000}], "truncate_prompt_tokens": -1}
    assert post(served.app, chat | {"max_tokens": 7}, path="/v1/chat/completions").status == 200
    assert post(served.app, chat, path="/v1/chat/completions").status == 200
    lengths = [len(requests[0].prompt_token_ids) for requests in served.client.submitted]
    assert lengths == [900, 993, 999]


def test_salt_and_priority_reach_the_engine(serve: Serve) -> None:
    served = serve()
    body = {"prompt": "Hi", "cache_salt": "mine", "priority": -3}
    assert post(served.app, body).status == 200
    [request] = served.client.submitted[0]
    assert (request.cache_salt, request.priority) == ("mine", -3)


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_without_text_come_as_they_are(serve: Serve, stream: bool) -> None:
    served = serve()
    body = {"prompt": "Hi", "detokenize": False, "return_token_ids": True, "stream": stream}
    reply = post(served.app, body)
    choices = [c for part in (reply.chunks if stream else [reply.json()]) for c in part["choices"]]
    ids = [i for choice in choices for i in choice["token_ids"]]
    assert ids == served.tokenizer.encode(" Hello world", add_special_tokens=False)
    assert {choice["text"] for choice in choices} == {""}
    assert len(choices) == (len(ids) if stream else 1)


def test_a_prompt_in_chunks_is_echoed_once_it_is_scored(serve: Serve) -> None:
    def play(request: NewRequest) -> list[RequestOutput]:
        [scored] = steps(request, [70])
        entries = scored.prompt_logprobs or []
        parts = [
            RequestOutput(request_id=request.request_id, token_ids=[], prompt_logprobs=[entry])
            for entry in entries
        ]
        return [*parts, replace(scored, prompt_logprobs=None)]

    body = {"prompt": [70, 71, 72], "echo": True, "logprobs": 0, "max_tokens": 1, "stream": True}
    for options in ({}, {"detokenize": False}):
        (chunk,) = post(serve(play).app, body | options).chunks
        scores = chunk["choices"][0]["logprobs"]["token_logprobs"]
        assert scores == [None, *(pytest.approx(-0.5 - i / 1000) for i in (71, 72, 70))]


def test_spaces_between_special_tokens_can_be_declined() -> None:
    backend = Backend(models.WordLevel({EOS: 0, "<a>": 1, "word": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    backend.add_special_tokens([EOS, "<a>"])
    spaced = tokenizer_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS))
    served = Served(lambda request: steps(request, [2, 0, 1, 1, 2]), spaced)

    def text(**options: Any) -> Any:
        body = {"prompt": [2], "skip_special_tokens": False} | options
        return post(served.app, body).json()["choices"][0]["text"]

    assert text() == " word <eos> <a> <a> word"
    assert text(spaces_between_special_tokens=False) == " word <eos><a><a> word"


def test_a_prompt_that_fills_the_context_can_be_scored(serve: Serve) -> None:
    def play(request: NewRequest) -> list[RequestOutput]:
        return [RequestOutput(request_id=request.request_id, token_ids=[], finish_reason="length")]

    app = serve(play).app
    scored = {"max_tokens": 0, "echo": True}
    reply = post(app, {"prompt": [70] * 1000} | scored)
    assert (reply.status, reply.json()["usage"]["total_tokens"]) == (200, 1000)
    reply = post(app, {"prompt": [70] * 1001} | scored)
    assert reply.status == 400
    assert (
        "requested 1001 tokens (1001 in the prompt, 0 in the completion)" in reply.error["message"]
    )
    reply = post(app, {"prompt": [70] * 1001, "truncate_prompt_tokens": -1} | scored)
    assert reply.json()["usage"]["prompt_tokens"] == 1000

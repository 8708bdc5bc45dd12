"""POST /v1/completions, whole and streamed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
from asgi import post
from scripted_client import saying, steps
from served import Served
from tokenizers import processors
from tokenizers_for_tests import BOS, EOS, byte_level_tokenizer, byte_level_wrapper, tokenizer_of
from transformers import PreTrainedTokenizerFast

from outrider.engine.api import NewRequest, RequestOutput, TokenLogprobs
from outrider.server.text.fill_in_the_middle import FillInTheMiddle
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_answer_has_the_shape_of_openai(serve: Serve) -> None:
    served = serve()
    answer = post(served.app, {"model": "test-model", "prompt": "Hi"}).json()
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    prompt_tokens = len(served.tokenizer.encode("Hi", add_special_tokens=True))
    completion_tokens = len(served.tokenizer.encode(" Hello world", add_special_tokens=False))
    assert answer == {
        "object": "text_completion",
        "model": "test-model",
        "system_fingerprint": ANY,
        "choices": [
            {
                "index": 0,
                "text": " Hello world",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_stream_ends_with_its_finish_reason_and_done(serve: Serve) -> None:
    chunks = post(serve().app, {"prompt": "Hi", "stream": True}).chunks
    assert joined(chunks) == " Hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_a_stream_that_the_engine_outruns_has_fewer_chunks(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = serve(saying(tokenizer, " Hello world" * 50))
    body = {"prompt": "Hi", "stream": True, "logprobs": 0, "max_tokens": 200}
    alone = post(served.app, body).chunks
    served.client.outruns = lambda: True
    chunks = post(served.app, body).chunks
    tokens = [c["choices"][0]["logprobs"]["tokens"] for c in chunks]
    assert (len(alone), list(map(len, tokens))) == (100, [64, 36])
    of_each = [t for c in alone for t in c["choices"][0]["logprobs"]["tokens"]]
    assert [*tokens[0], *tokens[1]] == of_each
    assert joined(chunks) == joined(alone)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"), [("Hi", 1), (["Hi", "Ho"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)]
)
def test_prompt_in_every_form(serve: Serve, prompt: Any, expected: int) -> None:
    served = serve()
    assert len(post(served.app, {"prompt": prompt}).json()["choices"]) == expected
    (requests,) = served.client.submitted  # all sequences in one submission
    ids = [request.prompt_token_ids for request in requests]
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        assert ids == (prompt if isinstance(prompt[0], list) else [prompt])


def test_choices_are_prompt_major(serve: Serve) -> None:
    def echo_first_token(request: NewRequest) -> list[RequestOutput]:
        return steps(request, request.prompt_token_ids)

    served = serve(echo_first_token)
    letters = [served.tokenizer.encode(c, add_special_tokens=False) for c in "ab"]
    answer = post(served.app, {"prompt": letters, "n": 2}).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a"),
        (1, "a"),
        (2, "b"),
        (3, "b"),
    ]
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"seed": 3}, "match"),
        ({"seed": 3, "speculation": {"verification": "block"}}, "block"),
        ({"speculation": {"verification": "token"}}, "token"),
        ({}, None),
    ],
)
def test_a_seed_asks_for_the_rule_that_no_draft_changes(
    serve: Serve, asked: dict[str, Any], rule: str | None
) -> None:
    served = serve()
    post(served.app, {"prompt": "Hi", "n": 2} | asked)
    (requests,) = served.client.submitted
    assert [request.params.verification for request in requests] == [rule, rule]


def test_samples_have_seeds_of_their_own(serve: Serve) -> None:
    served = serve()
    post(served.app, {"prompt": "Hi", "n": 3, "seed": -7})
    post(served.app, {"prompt": "Hi", "n": 3, "seed": -7})
    post(served.app, {"prompt": "Hi"})
    post(served.app, {"prompt": "Hi"})
    seeds = [[request.params.seed for request in s] for s in served.client.submitted]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert seeds[0][0] == 2**64 - 7
    assert seeds[2] != seeds[3]


def test_parameters_reach_the_engine(serve: Serve) -> None:
    served = serve()
    body = {
        "prompt": "Hi",
        "max_tokens": 5.0,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logprobs": 2,
        "speculation": {"num_speculative_tokens": 3, "verification": "match"},
    }
    assert post(served.app, body).status == 200
    params = served.client.submitted[0][0].params
    assert (params.max_tokens, params.temperature, params.top_p) == (5, 0.5, 0.25)
    assert (params.top_k, params.min_p, params.stop_token_ids) == (0, 0.125, (7,))
    assert (params.ignore_eos, params.logprobs, params.num_speculative_tokens) == (True, 2, 3)
    assert params.verification == "match"


def test_a_top_k_above_any_vocabulary_keeps_every_token(serve: Serve) -> None:
    served = serve()
    assert post(served.app, {"prompt": "Hi", "top_k": 10**12}).status == 200
    assert served.client.submitted[0][0].params.top_k == 2**31 - 1


def test_null_means_the_default(serve: Serve) -> None:
    served = serve()
    fields = ("max_tokens", "temperature", "n", "stop", "seed", "logprobs", "stream", "top_k")
    assert post(served.app, {"prompt": "Hi"} | dict.fromkeys(fields)).status == 200
    params = served.client.submitted[0][0].params
    assert (params.max_tokens, params.temperature, params.top_k) == (16, 1.0, 0)


def test_speculation_can_be_turned_off_for_a_request(serve: Serve) -> None:
    served = serve()
    post(served.app, {"prompt": "Hi", "speculation": {"enabled": False}})
    assert served.client.submitted[0][0].params.num_speculative_tokens == 0


def test_stop_string_ends_the_answer_and_the_sequence(serve: Serve, tokenizer: Tokenizer) -> None:
    # One step brings tokens from both sides of the stop string.
    served = serve(saying(tokenizer, "one two three four five six", sizes=(99,)))
    answer = post(served.app, {"prompt": "Hi", "stop": " three", "logprobs": 0}).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    assert choice["stop_reason"] == " three"
    until_stop = tokenizer.encode("one two three", add_special_tokens=False)
    assert answer["usage"]["completion_tokens"] == len(until_stop)
    assert choice["logprobs"]["tokens"] == [tokenizer.token_text(i) for i in until_stop]


def test_stopped_sequence_is_aborted_while_others_run(serve: Serve, tokenizer: Tokenizer) -> None:
    texts = ["one two three", "four five six seven"]
    served = serve(lambda request: saying(tokenizer, texts[int(request.request_id[-1])])(request))
    answer = post(served.app, {"prompt": "Hi", "n": 2, "stop": "tw"}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one ", texts[1]]
    assert served.client.aborted == [served.client.submitted[0][0].request_id]


@pytest.mark.parametrize("sizes", [(), (99,)])
def test_stop_string_before_min_tokens_is_text(
    serve: Serve, tokenizer: Tokenizer, sizes: tuple[int, ...]
) -> None:
    served = serve(saying(tokenizer, "one two three two four", sizes=sizes))
    body = {"prompt": "Hi", "stop": "two", "min_tokens": 4}
    (choice,) = post(served.app, body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two three ", "stop")


def test_stop_string_can_be_included(serve: Serve, tokenizer: Tokenizer) -> None:
    served = serve(saying(tokenizer, "one two three four"))
    body = {"prompt": "Hi", "stop": ["x", "two"], "include_stop_str_in_output": True}
    assert post(served.app, body).json()["choices"][0]["text"] == "one two"


def test_stop_token_is_counted_but_not_shown(serve: Serve, tokenizer: Tokenizer) -> None:
    *ids, last = tokenizer.encode("one two x", add_special_tokens=False)
    served = serve(lambda request: steps(request, [*ids, last], finish="stop"))
    answer = post(served.app, {"prompt": "Hi", "stop_token_ids": [last], "logprobs": 0}).json()
    (choice,) = answer["choices"]
    assert "one two x".removesuffix(tokenizer.token_text(last)) == choice["text"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", last)
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    shown = post(
        served.app, {"prompt": "Hi", "stop_token_ids": [last], "include_stop_str_in_output": True}
    )
    assert shown.json()["choices"][0]["text"] == "one two x"


def test_end_of_sequence_has_no_stop_reason(serve: Serve, tokenizer: Tokenizer) -> None:
    eos = tokenizer.backend.token_to_id(EOS)
    served = serve(lambda request: steps(request, [70, eos], finish="stop"))
    (choice,) = post(served.app, {"prompt": "Hi"}).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_logprobs_have_the_shape_of_openai(serve: Serve, tokenizer: Tokenizer) -> None:
    served = serve(saying(tokenizer, "one two"))
    ids = tokenizer.encode("one two", add_special_tokens=False)
    (choice,) = post(served.app, {"prompt": "Hi", "logprobs": 2}).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(i) for i in ids]
    assert logprobs["text_offset"] == [
        len(tokenizer.decode(ids[:i], skip_special_tokens=True)) for i in range(len(ids))
    ]
    for token, own, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == own == max(top.values())
        assert len(top) == 2


@pytest.mark.parametrize("stream", [True, False])
def test_echo_puts_the_prompt_first_once(serve: Serve, stream: bool) -> None:
    served = serve()
    prompts = ["Hi", "Ho"]
    body = {"prompt": prompts, "echo": True, "n": 2, "stream": stream}
    reply = post(served.app, body)
    texts = [joined(reply.chunks if stream else [reply.json()], index) for index in range(4)]
    assert texts == [f"{prompt} Hello world" for prompt in prompts for _ in range(2)]


def test_no_character_of_a_text_ends_an_events_line(serve: Serve) -> None:
    """Clients that use httpx's `iter_lines` take each of these for a line's end."""
    prompt = "é\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029 end"
    reply = post(serve().app, {"prompt": prompt, "echo": True, "stream": True})
    assert joined(reply.chunks) == f"{prompt} Hello world"
    assert all(line.startswith("data: ") for line in reply.body.decode().splitlines() if line)


def test_echo_of_token_ids_is_their_text(serve: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    answer = post(serve().app, {"prompt": ids, "echo": True}).json()
    assert answer["choices"][0]["text"] == "the fox Hello world"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("adds_token", [True, False])
def test_tokens_of_an_echoed_text_are_returned_at_their_places_in_it(
    adds_token: bool, skip: bool
) -> None:
    wrapper = byte_level_wrapper()
    if adds_token:
        wrapper.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 1)]
        )
    served = Served(lambda request: steps(request, [70]), tokenizer_of(wrapper))
    body = {"prompt": f"the{EOS} fox{EOS}", "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = post(served.app, body | {"skip_special_tokens": skip}).json()["choices"]
    assert choice["text"].startswith(f"the{EOS} fox{EOS}")
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert (tokens[0] == BOS) == adds_token
    for token, offset in zip(tokens[adds_token:], offsets[adds_token:], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert offsets[-1] == len(body["prompt"])


def test_alternative_of_the_same_text_does_not_hide_the_chosen_token(serve: Serve) -> None:
    def play(request: NewRequest) -> list[RequestOutput]:
        # Two tokens that are each part of a character: both read as U+FFFD.
        first, second = (served.tokenizer.backend.token_to_id(byte) for byte in ("ð", "Ł"))
        entry = TokenLogprobs(-2.0, [(second, -0.5), (first, -2.0)])
        return [
            RequestOutput(
                request_id=request.request_id,
                token_ids=[first],
                logprobs=[entry],
                finish_reason="length",
            )
        ]

    served = serve(play)
    (choice,) = post(served.app, {"prompt": "Hi", "logprobs": 2}).json()["choices"]
    # Nor does the chosen one hide that it was not the best.
    second = served.tokenizer.backend.token_to_id("Ł")
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -2.0, f"token_id:{second}": -0.5}]


def test_tokens_can_be_named_by_their_ids(serve: Serve, tokenizer: Tokenizer) -> None:
    served = serve(saying(tokenizer, "one"))
    ids = tokenizer.encode("one", add_special_tokens=False)
    body = {"prompt": "Hi", "logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = post(served.app, body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        [f"token_id:{i}"] for i in ids
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_token_ids_come_along_when_asked_for(
    serve: Serve, tokenizer: Tokenizer, stream: bool
) -> None:
    served = serve(saying(tokenizer, "one two three", sizes=(2, 3)))
    body = {"prompt": [[5, 6], [7]], "return_token_ids": True, "stream": stream, "stop": " t"}
    reply = post(served.app, body)
    ids: list[list[int]] = [[], []]
    prompts: list[list[int]] = [[], []]
    for chunk in reply.chunks if stream else [reply.json()]:
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice["token_ids"]
            prompts[choice["index"]] += choice.get("prompt_token_ids", [])
    everything = tokenizer.encode("one two three", add_special_tokens=False)
    until_stop = everything[: len(ids[0])]
    assert " t" in tokenizer.decode(until_stop, skip_special_tokens=True)
    assert " t" not in tokenizer.decode(until_stop[:-1], skip_special_tokens=True)
    assert ids == [until_stop, until_stop]
    assert prompts == [[5, 6], [7]]


def test_cached_tokens_are_those_of_each_prompts_first_sample(serve: Serve) -> None:
    def play(request: NewRequest) -> list[RequestOutput]:
        first = int(request.request_id.rpartition("-")[2]) % 3 == 0
        return steps(request, [70], cached_tokens=1 if first else 16)

    usage = post(serve(play).app, {"prompt": [[5, 6], [7, 8]], "n": 3}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_special_tokens_are_added_to_texts_unless_declined() -> None:
    tokenizer = byte_level_tokenizer()
    bos = tokenizer.backend.token_to_id(BOS)
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos)]
    )
    served = Served(lambda request: steps(request, [70]), tokenizer)
    post(served.app, {"prompt": "Hi"})
    post(served.app, {"prompt": "Hi", "add_special_tokens": False})
    first_ids = [requests[0].prompt_token_ids[0] for requests in served.client.submitted]
    assert first_ids[0] == bos
    assert first_ids[1] != bos


@pytest.mark.parametrize(
    ("marks", "order"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "0a1b2"),
        (("[PREFIX]", "[SUFFIX]"), "1b0a"),
    ],
)
def test_gap_before_a_suffix_is_filled_by_a_model_that_can(
    marks: tuple[str, ...], order: str
) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.backend.add_special_tokens([*marks, "<|file_sep|>"])
    tokenizer = tokenizer_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend))
    ids = [tokenizer.backend.token_to_id(mark) for mark in marks]
    served = Served(lambda request: steps(request, [70, 71], finish="stop"), tokenizer)
    reply = post(served.app, {"prompt": "def f(", "suffix": "return 1"})
    assert reply.status == 200
    (request,) = served.client.submitted[0]
    texts = {
        "a": tokenizer.encode("def f(", add_special_tokens=False),
        "b": tokenizer.encode("return 1", add_special_tokens=False),
    } | {str(i): [token_id] for i, token_id in enumerate(ids)}
    assert request.prompt_token_ids == [token_id for part in order for token_id in texts[part]]
    end = tokenizer.backend.token_to_id("<|file_sep|>")
    assert request.params.stop_token_ids == (end,)
    error = post(served.app, {"prompt": "a", "suffix": "b", "echo": True}).error
    assert error["param"] == "suffix"


@pytest.mark.parametrize(
    ("room", "side", "before", "behind"),
    [
        (6, "left", [10, 11, 12, 13], [20, 21]),
        (4, "left", [12, 13], [20, 21]),
        (5, "right", [10, 11, 12, 13], [20]),
        (4, "right", [10, 11, 12, 13], []),
        # Both texts, if one is not enough: what is next to the gap stays, and so do the marks.
        (1, "left", [], [20]),
        (1, "right", [13], []),
        (0, "left", [], []),
        (-2, "left", [], []),
    ],
)
def test_a_prompt_with_a_gap_is_cut_at_the_ends_of_its_texts(
    room: int, side: Any, before: list[int], behind: list[int]
) -> None:
    texts = ([10, 11, 12, 13], [20, 21])
    marks = FillInTheMiddle(begin=[0], prefix=1, suffix=2, middle=3, ends=[])
    assert marks.prompt(*texts) == [0, 1, *texts[0], 2, *texts[1], 3]
    assert marks.prompt(*texts, most=4 + room, side=side) == [0, 1, *before, 2, *behind, 3]
    marks = replace(marks, middle=None)
    assert marks.prompt(*texts, most=3 + room, side=side) == [0, 2, *behind, 1, *before]


@pytest.mark.parametrize(("limit", "side", "num_kept"), [(5, "left", 5), (-1, "right", 990)])
def test_a_prompt_with_a_gap_keeps_its_marks(limit: int, side: str, num_kept: int) -> None:
    tokenizer = byte_level_tokenizer()
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer.backend.add_special_tokens([*marks])
    tokenizer = tokenizer_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend))
    served = Served(lambda request: steps(request, [70]), tokenizer)
    body = {"prompt": [70] * 600, "suffix": "x" * 5000, "max_tokens": 10}
    cut = {"truncate_prompt_tokens": limit, "truncation_side": side}
    assert post(served.app, body | cut).status == 200
    (request,) = served.client.submitted[0]
    assert len(request.prompt_token_ids) == num_kept
    assert set(map(tokenizer.backend.token_to_id, marks)) < set(request.prompt_token_ids)


def test_most_logprobs_are_asked_for_with_minus_one(serve: Serve) -> None:
    served = serve(max_logprobs=3)
    (choice,) = post(served.app, {"prompt": "Hi", "logprobs": -1}).json()["choices"]
    assert served.client.submitted[-1][0].params.logprobs == 3
    assert len(choice["logprobs"]["top_logprobs"][0]) >= 3
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": -1}
    assert post(served.app, body, path="/v1/chat/completions").status == 200
    assert served.client.submitted[-1][0].params.logprobs == 3
    assert post(served.app, {"prompt": "Hi", "prompt_logprobs": -1}).status == 200
    assert served.client.submitted[-1][0].params.prompt_logprobs == 3
    for name in ("logprobs", "prompt_logprobs"):
        error = post(served.app, {"prompt": "Hi", name: 4}).error
        assert error["param"] == name
        assert "server.max_logprobs" in error["message"]


def test_whole_numbers_may_be_written_as_floats(serve: Serve) -> None:
    served = serve()
    assert post(served.app, {"prompt": [70.0, 71], "allowed_token_ids": [70.0]}).status == 200
    assert served.client.submitted[0][0].prompt_token_ids == [70, 71]
    assert post(served.app, {"prompt": [70.5]}).error["param"] == "prompt"


def test_fingerprint_is_the_same_for_the_same_server(serve: Serve) -> None:
    served = serve()
    first, second = (post(served.app, {"prompt": "Hi"}).json() for _ in range(2))
    assert first["system_fingerprint"] == second["system_fingerprint"]
    assert first["system_fingerprint"].startswith("fp_")

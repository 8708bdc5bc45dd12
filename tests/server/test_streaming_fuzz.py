"""Whatever the tokens, the steps and the stop strings: a stream says what a whole answer says."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from asgi import post
from message_parts import merged_calls
from scripted_client import steps
from served import Served

from outrider.engine.api import NewRequest, RequestOutput, SamplingParams
from outrider.server.api.generation import Sample, TextOptions
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]

CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
ALPHABET = ["a", "b", " one", "é", "你", "🙂", "👩‍👩‍👧", "<stop>", "\n", "ß"]
CHAT_ALPHABET = [*ALPHABET, CALL, f"{CALL}\n{CALL}", "<tool", "<think>", "</think>", "</tool_call>"]


def random_ids(
    rng: random.Random, tokenizer: Tokenizer, alphabet: list[str] = ALPHABET
) -> list[int]:
    """Mostly real text, whose characters span tokens; at times any tokens at all."""
    if rng.random() < 0.3:
        size = tokenizer.backend.get_vocab_size()
        return [rng.randrange(2, size) for _ in range(rng.randint(1, 12))]
    text = "".join(rng.choices(alphabet, k=rng.randint(1, 10)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[: rng.randint(1, len(ids))]  # the end may fall within a character


def random_stops(rng: random.Random, text: str) -> list[str]:
    """Stop strings cut from the text, so that they do occur, and some that do not."""
    stops = []
    for _ in range(rng.randrange(4)):
        start = rng.randrange(len(text)) if text else 0
        stop = text[start : start + rng.randint(1, 6)]
        stops.append((stop + "x" if rng.random() < 0.2 else stop) or "x")
    return stops


def expected_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


def test_any_steps_give_the_text_of_a_plain_search(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    for case in range(2000):
        ids = random_ids(rng, tokenizer)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        stops = random_stops(rng, text)
        include = rng.random() < 0.5
        request = NewRequest(
            request_id="r", prompt_token_ids=[70], params=SamplingParams(max_tokens=99)
        )
        options = TextOptions(stop=tuple(stops), include_stop=include)
        sample = Sample(0, request, tokenizer, options)
        shown, tokens, last = "", 0, None
        for output in steps(request, ids, sizes=rng.choices(range(1, 5), k=len(ids))):
            delta = sample.take(output)
            if delta is not None:
                shown += delta.text
                tokens += len(delta.tokens)
                last = delta
            if sample.finished:
                break
        expected, stop = expected_text(text, stops, include)
        assert last is not None, case
        assert shown == expected, case
        assert last.stop_reason == stop, case
        assert last.finish_reason == ("length" if stop is None else "stop"), case
        assert last.completion_tokens == tokens <= len(ids), case
        if stop is not None:
            # No token fewer would have completed the stop string.
            fewer = tokenizer.decode(ids[: tokens - 1], skip_special_tokens=True)
            assert stop not in fewer.rstrip("\ufffd"), case


def append(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part of a stream to what came before, as a client would."""
    for key, value in part.items():
        if key == "index":
            whole[key] = value
        elif value is None:
            whole.setdefault(key, None)
        elif isinstance(value, dict):
            whole[key] = whole.get(key) or {}
            append(whole[key], value)
        elif isinstance(value, list) and key != "prompt_token_ids":
            whole[key] = (whole.get(key) or []) + value
        elif key in ("text", "content", "reasoning", "reasoning_content"):
            whole[key] = whole[key] + value if whole.get(key) else value
        else:
            assert whole.get(key) is None, key  # nothing follows a finish_reason
            whole[key] = value


def merged(chunks: list[Any], num_choices: int) -> list[Any]:
    """The choices of a stream, put together."""
    choices: list[dict[str, Any]] = [{} for _ in range(num_choices)]
    for chunk in chunks:
        for part in chunk["choices"]:
            append(choices[part["index"]], part)
    return choices


COMPLETION = {"prompt": "Hi"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=pytest.mark.deep if i >= 4 else ()) for i in range(8)]
)
def test_stream_equals_whole_answer(
    serve: Serve, tokenizer: Tokenizer, seed: int, path: str
) -> None:
    chat = path == "/v1/chat/completions"
    logprobs: list[dict[str, Any]] = [{"logprobs": 0}, {"logprobs": 3}, {"echo": True}]
    if chat:
        logprobs = [{"logprobs": True}, {"logprobs": True, "top_logprobs": 3}]
    rng = random.Random(seed)
    script: dict[str, tuple[list[int], str]] = {}
    sizes_of = random.Random()

    def play(request: NewRequest) -> list[RequestOutput]:
        ids, finish = script[request.request_id.rpartition("-")[2]]
        sizes = sizes_of.choices(range(1, 6), k=len(ids))  # other steps each time
        return steps(request, ids, sizes=sizes, finish=finish)

    served = serve(play, tool_call_format="hermes", reasoning_content=chat)
    served.client.outruns = lambda: sizes_of.random() < 0.5
    for _ in range(40):
        n = rng.randint(1, 3)
        script.clear()
        for index in range(n):
            ids = random_ids(rng, tokenizer, CHAT_ALPHABET if chat else ALPHABET)
            script[str(index)] = ids, rng.choice(["length", "stop"])
        text = tokenizer.decode(script["0"][0], skip_special_tokens=True)
        body = {
            **(CHAT if chat else COMPLETION),
            **(TOOLS if chat and rng.random() < 0.5 else {}),
            "n": n,
            "stop": random_stops(rng, text) or None,
            **rng.choice([*logprobs, {}]),
            "return_token_ids": rng.random() < 0.5,
            "include_stop_str_in_output": rng.random() < 0.5,
            "skip_special_tokens": rng.random() < 0.5,
        }
        whole = post(served.app, body, path=path).json()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = post(served.app, body, path=path).chunks
        choices = merged(chunks, n)
        if chat:
            for choice in choices:
                choice["message"] = {"refusal": None} | choice.pop("delta")
                if "tool_calls" in choice["message"]:  # known only after the first chunk
                    choice["message"]["content"] = choice["message"]["content"] or None
                if "tool_calls" in choice["message"]:
                    choice["message"]["tool_calls"] = [
                        {key: value for key, value in call.items() if key != "id"}
                        for call in merged_calls(choice["message"]["tool_calls"])
                    ]
            for choice in whole["choices"]:
                for call in choice["message"].get("tool_calls", []):
                    assert call.pop("id")
        for choice in whole["choices"]:  # what streams do not have
            for key in ("prompt_logprobs", "prompt_token_ids", "token_ids"):
                if choice.get(key, ()) is None:
                    del choice[key]
        assert choices == whole["choices"]
        assert last["usage"] == whole["usage"]

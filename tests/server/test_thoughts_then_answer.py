"""A schema or a forced tool binds the answer after the model's thoughts."""

import json
from typing import Any

import pytest
import scripted_client
from asgi import Reply, post
from grammars import compile_grammar, fitting
from served import Served
from tokenizers_for_tests import byte_level_wrapper, tokenizer_of

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.server.text.tokenizer import Tokenizer

EOS = 0
HARMONY = ["start", "end", "message", "channel", "constrain", "return", "call"]
MARKERS = ["<think>", "</think>", *(f"<|{name}|>" for name in HARMONY)]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CALL = '[{"name": "add", "arguments": {"a": 1}}]'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Its markers are tokens."""
    wrapper = byte_level_wrapper()
    wrapper.add_tokens(MARKERS)
    return tokenizer_of(wrapper)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    size = tokenizer.backend.get_vocab_size()
    return GrammarCompiler(tokenizer.token_table(size), (EOS,), size)


@pytest.fixture
def served(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Served:
    return serving(tokenizer, compiler)


def serving(tokenizer: Tokenizer, compiler: GrammarCompiler, **settings: Any) -> Served:
    """A model that reasons, and says nothing yet."""
    play = scripted_client.saying(tokenizer, "", finish="stop")
    settings = {"reasoning_content": True} | settings
    return Served(play, tokenizer, compiler=compiler, **settings)


def chat(served: Served, mood: str | None = None, **fields: Any) -> Reply:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200} | fields
    if mood is not None:
        body["chat_template_kwargs"] = {"mood": mood}
    return post(served.app, body, path="/v1/chat/completions")


def fits(served: Served, compiler: GrammarCompiler, text: str) -> bool:
    """Whether the grammar of the newest request allows this answer, and nothing after it."""
    grammar = served.client.submitted[-1][0].params.grammar
    assert grammar is not None
    ids = [*served.tokenizer.encode(text, add_special_tokens=False), EOS]
    return fitting(compile_grammar(compiler, grammar), ids) == ids


JSON = '{"a": 1}'
THOUGHT = 'Hm {"a": x}\n\n'


@pytest.mark.parametrize(
    ("mood", "fitting", "wrong"),
    [
        (  # the model opens its thoughts itself, or does not think
            None,
            [JSON, f"<think>{THOUGHT}</think>{JSON}", f"<think></think>\n\n{JSON}"],
            [THOUGHT, f"{THOUGHT}</think>{JSON}", f"<think>{THOUGHT}", f"{JSON}</think>{JSON}"],
        ),
        (  # the prompt opens them
            "<think>\n",
            [f"{THOUGHT}</think>{JSON}", f"</think>\n\n{JSON}"],
            [JSON, f"{THOUGHT}</think>", f"{THOUGHT}</think>{THOUGHT}", f"a</think>{JSON}x"],
        ),
        (
            "<think>\n\n</think>\n\n",
            [JSON],
            [THOUGHT, f"a</think>{JSON}", f"<think></think>{JSON}"],
        ),
        (  # an end that is spelled in other tokens' text is none
            "<think>\n",
            [],
            [f"a</think></think>{JSON}"],
        ),
    ],
)
def test_the_schema_begins_right_after_the_thoughts(
    served: Served,
    compiler: GrammarCompiler,
    mood: str | None,
    fitting: list[str],
    wrong: list[str],
) -> None:
    assert chat(served, mood, response_format=FORMAT).status == 200
    for text in fitting:
        assert fits(served, compiler, text), text
    for text in wrong:
        assert not fits(served, compiler, text), text


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"regex": r"[0-9]{2}\}"}, "12}"),
        ({"choice": ["yes", "n}o"]}, "n}o"),
        ({"json": SCHEMA}, JSON),
        ({"json_object": True}, '{"b": [1]}'),
        ({"grammar": 'start: word\nword: "}" | "{" # }\n'}, "}"),
        ({"grammar": 'root ::= "a}" root2\nroot2 ::= [0-9]'}, "a}7"),
    ],
)
def test_every_kind_of_grammar_may_follow_thoughts(
    served: Served, compiler: GrammarCompiler, given: dict[str, Any], answer: str
) -> None:
    reply = chat(served, "<think>", structured_outputs=given)
    assert reply.status == 200, reply.body
    assert fits(served, compiler, f"so</think>{answer}")
    assert not fits(served, compiler, f"so</think>{answer}!")
    assert not fits(served, compiler, answer)


def test_a_grammar_that_cannot_be_followed_is_refused_also_after_thoughts(served: Served) -> None:
    reply = chat(served, "<think>", structured_outputs={"grammar": "start: nothing"})
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (3, 1, 7), (100,)])
@pytest.mark.parametrize("mood", [None, "<think>\n"])
def test_thoughts_are_reasoning_and_the_answer_is_content(
    served: Served, mood: str | None, sizes: tuple[int, ...], stream: bool
) -> None:
    text = f"{'' if mood else '<think>'}{THOUGHT}</think>\n\n{JSON}"
    served.client.play = scripted_client.saying(served.tokenizer, text, sizes=sizes, finish="stop")
    reply = chat(served, mood, response_format=FORMAT, stream=stream)
    messages = (
        [part["choices"][0]["delta"] for part in reply.chunks if part["choices"]]
        if stream
        else [reply.json()["choices"][0]["message"]]
    )
    assert "".join(m.get("reasoning_content") or "" for m in messages) == THOUGHT
    assert "".join(m.get("content") or "" for m in messages) == JSON


def test_an_answer_that_is_cut_off_while_thinking_has_no_content(served: Served) -> None:
    served.client.play = scripted_client.saying(served.tokenizer, "Hm.", finish="length")
    choice = chat(served, "<think>\n", response_format=FORMAT).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["reasoning_content"] == "Hm."


@pytest.mark.parametrize("mood", [None, "<think>\n"])
def test_a_forced_tool_is_called_after_the_thoughts(
    served: Served, compiler: GrammarCompiler, mood: str | None
) -> None:
    text = f"{'' if mood else '<think>'}{THOUGHT}</think>\n\n{CALL}"
    served.client.play = scripted_client.saying(served.tokenizer, text, finish="stop")
    reply = chat(served, mood, tools=[ADD], tool_choice="required")
    assert fits(served, compiler, text)
    assert not fits(served, compiler, text.replace(": 1", ": x"))
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


def test_markers_within_the_answer_are_text(served: Served) -> None:
    text = 'Hm.</think>"<think> </think>"'
    served.client.play = scripted_client.saying(served.tokenizer, text, finish="stop")
    reply = chat(served, "<think>", response_format={"type": "json_object"})
    assert reply.json()["choices"][0]["message"]["content"] == '"<think> </think>"'


def test_a_turn_that_is_continued_outside_of_thoughts_has_none(
    served: Served, compiler: GrammarCompiler
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So:"}]
    given = {"messages": turns, "continue_final_message": True, "response_format": FORMAT}
    chat(served, **given)
    assert fits(served, compiler, JSON)
    assert not fits(served, compiler, f"<think>a</think>{JSON}")


def test_without_reasoning_the_schema_begins_at_once(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    served = serving(tokenizer, compiler, reasoning_content=False)
    chat(served, "<think>\n", response_format=FORMAT)
    assert fits(served, compiler, JSON)
    assert not fits(served, compiler, f"a</think>{JSON}")


def test_gpt_oss_thinks_on_its_channels_and_answers_on_the_last(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    served = serving(tokenizer, compiler, tool_call_format="harmony", reasoning_content=None)
    begin = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final"
    text = f"{begin} <|constrain|>json<|message|>{JSON}"
    served.client.play = scripted_client.saying(served.tokenizer, text, finish="stop")
    reply = chat(served, "<|start|>assistant", response_format=FORMAT)
    assert fits(served, compiler, text)
    assert fits(served, compiler, f"<|channel|>final<|message|>{JSON}")
    assert not fits(served, compiler, f"{begin}<|message|>{THOUGHT}")
    assert not fits(served, compiler, JSON)
    message = reply.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, JSON)

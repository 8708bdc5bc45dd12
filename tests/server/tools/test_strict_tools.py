"""Calls of strict tools follow their schemas, wherever the model begins them."""

import json
from typing import Any

import pytest
import scripted_client
import tokenizers
from grammars import compile_grammar, fitting
from scripted_client import steps
from served import Served
from tokenizers_for_tests import CHAT_TEMPLATE, byte_level_wrapper, tokenizer_of
from tool_requests import ADD, CALL_ADD, CALL_NEGATE, EOS, NEGATE, chat, fits, grammar_of
from transformers import PreTrainedTokenizerFast

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.server.text.tokenizer import Tokenizer

STRICT_ADD = {"type": "function", "function": {**ADD["function"], "strict": True}}
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
WRONG_ADD = CALL_ADD.replace("1", '"1"')


def marked(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def saying(
    text: str, tokenizer: Tokenizer, compiler: GrammarCompiler | None, **settings: Any
) -> Served:
    """A model that reasons, and says this."""
    settings = {"tool_call_format": "hermes", "reasoning_content": True} | settings
    play = scripted_client.saying(tokenizer, text, finish="stop")
    return Served(play, tokenizer, compiler=compiler, **settings)


@pytest.fixture(scope="module")
def marking() -> Tokenizer:
    """Its model marks calls and thoughts with tokens, as Qwen's do."""
    wrapper = byte_level_wrapper()
    wrapper.add_tokens(MARKERS)
    return tokenizer_of(wrapper)


@pytest.fixture(scope="module")
def marking_compiler(marking: Tokenizer) -> GrammarCompiler:
    size = marking.backend.get_vocab_size()
    return GrammarCompiler(marking.token_table(size), (EOS,), size)


@pytest.mark.parametrize(
    ("mood", "text", "allowed"),
    [
        (None, "Hello <b>there</b>\n", True),
        (None, marked(CALL_ADD), True),
        (None, f"Let me see. {marked(CALL_ADD)}\n{marked(CALL_NEGATE)} Done.", True),
        (None, marked(WRONG_ADD), False),
        (None, marked(CALL_NEGATE.replace("1", '"1"')), True),  # not strict
        (None, marked(CALL_ADD.replace("add", "sub")), False),
        (None, f"<think>{WRONG_ADD}<b></think>{marked(CALL_ADD)}", True),
        (None, f"<think>Hm.</think>{marked(WRONG_ADD)}", False),
        ("<think>\n", f"Hm.</think>{marked(CALL_ADD)}", True),
        ("<think>\n", f"Hm.</think>{marked(WRONG_ADD)}", False),
        (None, f"so.</think>{marked(CALL_ADD)}", False),
    ],
)
def test_call_of_a_strict_tool_follows_its_schema(
    marking: Tokenizer,
    marking_compiler: GrammarCompiler,
    mood: str | None,
    text: str,
    allowed: bool,
) -> None:
    served = saying("", marking, marking_compiler)
    given: dict[str, Any] = {"tools": [STRICT_ADD, NEGATE], "chat_template_kwargs": {"mood": mood}}
    grammar = grammar_of(served, **given)
    assert fits(marking_compiler, marking, grammar, text) == allowed
    spelled = [marking.backend.token_to_id(character) for character in "<tool_call>"]
    assert fitting(compile_grammar(marking_compiler, grammar), spelled) != spelled or mood


def test_call_of_a_strict_tool_follows_its_schema_behind_a_thought_of_the_last_message(
    marking: Tokenizer, marking_compiler: GrammarCompiler
) -> None:
    served = saying("", marking, marking_compiler)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>And"}]
    given: dict[str, Any] = {"messages": turns, "continue_final_message": True}
    grammar = grammar_of(served, tools=[STRICT_ADD, NEGATE], **given)
    for call, allowed in ((CALL_ADD, True), (WRONG_ADD, False)):
        text = f" so.</think>{marked(call)}"
        assert fits(marking_compiler, marking, grammar, text) == allowed


def test_reasoning_before_the_call_of_a_strict_tool_is_separated(
    marking: Tokenizer, marking_compiler: GrammarCompiler
) -> None:
    served = saying(f"<think>Hm.</think>{marked(CALL_ADD)}", marking, marking_compiler)
    message = chat(served, tools=[STRICT_ADD]).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}


@pytest.mark.parametrize("sizes", [(1,), (100,), (7, 3, 5, 1)])
def test_a_marker_spelled_in_a_string_of_a_strict_call_is_text(
    marking: Tokenizer, marking_compiler: GrammarCompiler, sizes: tuple[int, ...]
) -> None:
    begin, string, end = '<tool_call>{"name": "add", "arguments": {"a": "', "</tool_call>!", '"}}'
    ids = marking.encode(begin, add_special_tokens=False)
    for character in string:  # as a model can that does not mean the token
        ids += marking.encode(character, add_special_tokens=False)
    ids += [*marking.encode(f"{end}</tool_call>", add_special_tokens=False), EOS]
    for strict in (True, False):
        served = Served(
            lambda request: steps(request, ids, sizes=sizes, finish="stop"),
            marking,
            compiler=marking_compiler,
            tool_call_format="hermes",
        )
        tool = {"name": "add", "strict": strict, "parameters": {"type": "object"}}
        reply = chat(served, tools=[{"type": "function", "function": tool}])
        message = reply.json()["choices"][0]["message"]
        if strict:
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": string}
            assert not message["content"]
        else:  # it may have ended in the middle of a string
            assert message["content"]


@pytest.fixture(scope="module")
def wordy() -> Tokenizer:
    """Its markers are words like others."""
    backend = json.loads(byte_level_wrapper().backend_tokenizer.to_str())
    vocab = backend["model"]["vocab"]
    vocab |= {marker: len(vocab) + i for i, marker in enumerate(MARKERS)}
    backend = tokenizers.Tokenizer.from_str(json.dumps(backend))
    return tokenizer_of(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<eos>", chat_template=CHAT_TEMPLATE
        )
    )


def test_strict_tools_are_bound_only_where_markers_are_tokens(
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    marking: Tokenizer,
    marking_compiler: GrammarCompiler,
    wordy: Tokenizer,
) -> None:
    size = wordy.backend.get_vocab_size()
    for served in (
        saying("Hi", wordy, GrammarCompiler(wordy.token_table(size), (EOS,), size)),
        saying("Hi", tokenizer, compiler),
        saying("Hi", marking, None),
        saying("Hi", marking, marking_compiler, tool_call_format="mistral"),
    ):
        assert chat(served, tools=[STRICT_ADD]).status == 200
        assert served.client.submitted[-1][0].params.grammar is None

"""Prompts of chats are those that transformers makes of them."""

from typing import Any

import pytest
from tokenizers_for_tests import CHAT_TEMPLATE, byte_level_wrapper, tokenizer_of

from outrider.server.text.chat_template import ChatTemplateError

USER = {"role": "user", "content": "Hi "}
ASSISTANT = {"role": "assistant", "content": "Hello", "name": None, "reasoning": "so"}
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris"}}, "type": "function"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"<": "ñ"}}}
TEMPLATES = {
    "small": CHAT_TEMPLATE,
    "all that transformers adds to jinja": """\
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {{- bos_token }}[{{ message.role }}]{{ message | tojson(indent=2) }}
    {%- generation %}{{ message.content }}{% endgeneration %}{{ message.reasoning_content }}
    {%- if loop.index == 9 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools is defined and tools %}{{ tools | tojson(ensure_ascii=False) }}{% endif %}
{%- if documents %}documents{% endif %}{{ strftime_now("%Y") | length }}{{ mood }}{{ eos_token }}
{%- if add_generation_prompt %}[assistant]{% endif %}""",
    "by name": {
        "default": "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
        "tool_use": "with tools: {{ tools | tojson }}{{ messages[-1].content }}",
    },
}
CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {"add_generation_prompt": True}),
    ([USER, ASSISTANT], {"continue_final_message": True}),
    ([USER, ASSISTANT | {"content": "Hello  "}], {"continue_final_message": True}),
    ([{"role": "system", "content": "Be <brief>."}, USER, ASSISTANT, USER], {}),
    ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, USER], {"tools": [TOOL]}),
    ([USER], {"variables": {"mood": "glad", "eos_token": "!"}}),
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("case", range(len(CHATS)))
def test_a_prompt_is_what_transformers_makes(name: str, case: int) -> None:
    messages, given = CHATS[case]
    asked = {"tools": [], "add_generation_prompt": False, "continue_final_message": False}
    asked |= {"variables": {}} | given
    wrapper = byte_level_wrapper()
    wrapper.chat_template = TEMPLATES[name]
    template = tokenizer_of(wrapper).chat_template
    assert template is not None
    expected = wrapper.apply_chat_template(
        messages,
        tools=asked["tools"] or None,
        tokenize=False,
        add_generation_prompt=asked["add_generation_prompt"],
        continue_final_message=asked["continue_final_message"],
        **asked["variables"],
    )
    assert template.render(messages, **asked) == expected != ""


def test_templates_without_a_default_say_so() -> None:
    wrapper = byte_level_wrapper()
    wrapper.chat_template = {"rag": "x"}
    template = tokenizer_of(wrapper).chat_template
    assert template is not None
    with pytest.raises(ChatTemplateError, match="none of its templates is the default: rag"):
        template.render(
            [USER], tools=[], add_generation_prompt=True, continue_final_message=False, variables={}
        )

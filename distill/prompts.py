"""The beginnings of conversations: token ids around and inside the user's turn."""

import importlib.util
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outrider.engine.models.architectures import eos_token_ids, load_config

from .recipe import DistillError

_MARK = "\u241e"  # a sign that no template contains
_MAX_PROMPTS = 200_000
_MOST_SHOWN = 200  # characters of a record
_SPACES = "\u0120\u2581"  # how vocabularies write the space before a word
_SHORTEST_WORD = 4  # letters

# How user turns may begin, by kind; the target continues them.
_UNASKED = ("",)
_CHAT = (
    "What is", "What are", "What causes", "What should I", "What would happen if", "How do I",
    "How does", "How can I", "Why do", "Why is", "When", "Who was", "Which", "Can you", "Could you",
    "Is it", "If I have", "A train", "My", "I", "I am", "I have been feeling", "I would like to",
    "We are", "Explain", "Explain to a child how", "Explain the difference between",
    "Tell me about", "Give me some advice on", "Give me a plan for", "Help me plan", "List five",
    "Describe", "Compare", "Recommend", "Translate", "Calculate", "Solve the following problem:",
    "Write a short story about", "Write a poem", "Write an email to", "Write a letter", "Write",
)  # fmt: skip
_CODE = (
    "Write a Python function that", "Write a Python function to", "Write a program that",
    "Write a function in JavaScript that", "Write a JavaScript", "Write a C function",
    "Write a SQL query that", "Write a class in Python", "Write a bash script", "Write a regular",
    "Write unit tests for", "Implement", "Create an HTML page", "How do I use Python to", "def ",
    "Fix the bug in this code:\n\n```python\n", "Here is my Python code:\n\n```python\n",
    "Explain what this code does:\n\n```python\n", "Refactor this function:\n\n```python\ndef ",
)  # fmt: skip
_OF_TEXT = tuple(
    f"{task}\n\n{start}"
    for task in (
        "Summarize the following text:", "Summarize this email.", "What is this passage about?",
        "Write a one-sentence summary of the text below.", "Answer the question below the text.",
        "Give me the main points of this article.", "What does the author of this text argue?",
    )
    for start in (
        "", "The", "In", "A", "Many", "When", "Last", "People", "Researchers", "Our", "Hi",
        "Dear", "It", "Since", "For", "At", "This", "On", "After",
    )
)  # fmt: skip
_JSON = (
    "Return a JSON object with the keys", "Return a JSON object with", "Give me a JSON array of",
    "Convert this to JSON:\n\n", "Convert this to JSON:\n\nname:", "Convert this table to JSON:",
    "Extract the names and dates from this text as JSON:\n\n", "Write a JSON schema for",
    "Extract the products and prices from this sentence as JSON:", "Output a JSON object that",
    "Generate sample JSON data for", "Answer in JSON:", "Create a JSON document for a",
    "Describe in JSON", 'Fill in this JSON: {"',
)  # fmt: skip
_ARTICLES = tuple(
    f"{task} {topic}"
    for task in (
        "Write a news report about", "Write a short article about", "Write an email about",
        "Tell me what happened to", "Write a paragraph on", "Describe",
    )
    for topic in (
        "a", "the", "an old", "a new", "the history of", "how", "why", "our", "two", "a small",
    )
)  # fmt: skip
# All are equally frequent.
OPENINGS = (_UNASKED, _UNASKED, _CHAT, _CHAT, _CODE, _CODE, _OF_TEXT, _ARTICLES, _JSON, _JSON)

# How texts that are no chat may begin, by kind; `{}` stands for a word of the vocabulary. The
# target continues them, without its chat template.
_FACTS = (
    "The", "In", "A", "The {}", "The {} of", "The first {}", "The main {} of", "The largest {} in",
    "The history of {}", "In the {}", "In 19", "Many {}", "There are several {}", "One of the most",
    "The difference between {} and", "According to", "{} is", "{} are", "{} was", "Most people",
    "The word {}", "The {} was built", "Researchers have found that {}", "It is known that",
)  # fmt: skip
_STORIES = (
    "Once upon a time", "Once, a {}", "It was", "When", "She", "He", "I", "We", "They", "My {}",
    "The {} had", "Every {}", '"I', '"Where is the {}', "Last night", "The old {}", "After the {}",
    "There was a {}", "Nobody knew", "Chapter 1\n\n", "Roses are red,\n", "As a {}, I",
)  # fmt: skip
_PAGES = (
    "# {}\n\n", "## {}\n\n", "# How to {}\n\n", "Title: {}\n", "{}:", "1.", "1. {}", "- {}\n-",
    "Abstract\n\n", "Introduction\n\n", "How to {}\n\nStep 1:", "Ten {}", "Why {}", "News:",
    "{} recipe\n\n", "Ingredients:\n", "Dear", "Dear {},\n\n", "Subject: {}\n\n", "To:", "Today,",
    "The {} review:", "Review:", "Agenda\n\n", "On Monday,", "For sale: {}", "Welcome to", "Our {}",
    "| {} |", "Name,", "Frequently asked questions\n\n",
)  # fmt: skip
_EXAMPLES = (
    "Q:", "Q: What is {}?\nA:", "Question: {}", "Question: What is {}?\nAnswer:", "Problem:", "Who",
    "What is {}?", "Why do {}", "{} ->", "English: {}\nFrench:", "Text: {}", "Sentence: The {}",
    "Alice: Hello", "Customer:", "Teacher:", "User:", "Interviewer:", "Solve:", "Input: {}\n",
    "Translate English to Spanish:\n", "Word: {}\nMeaning:", "Fact:", "Example 1:\n", "Human:",
)  # fmt: skip
_PROGRAMS = (
    "def", "def {}(", "def is_{}(", "import", "import os\n", "import numpy as np\n", "from",
    "class", "class {}:\n", "#!/bin/bash\n", "#include <", "function {}(", "const", "SELECT",
    "public class", "<html>\n", "<!DOCTYPE html>\n", "# This program", '"""', "// {}\n", "$",
    "for i in range(", '{{"', '{{\n  "{}":', '[{{"', "```python\n", "package", "fn", "try:\n",
)  # fmt: skip
RAW_OPENINGS = (_FACTS, _FACTS, _STORIES, _PAGES, _EXAMPLES, _PROGRAMS)  # all equally frequent

# What users ask about a text that they paste, before or after it.
TASKS = (
    "Summarize this.", "Summarise the text in three sentences.", "Summarize in one sentence:",
    "Write a brief summary of the following.", "What are the most important points?", "TL;DR",
    "List the key facts as bullet points.", "What is the main idea of this text?",
    "Explain this in simple words.", "Rewrite this so that it is shorter:", "Give it a title.",
    "Rewrite this in a more formal tone:", "Correct the mistakes in this text.", "Continue:",
    "Which people, places and dates are named here? Answer in JSON.", "Turn this into JSON.",
    "Extract the main facts as a JSON object.", "Write three questions about this text.",
    "Return a JSON array of the key words.", "Do you agree with this?", "What does this mean?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The token ids of a conversation around the user's turn, and those that end a turn."""

    before: list[int]
    after: list[int] | None  # None: no chat template; the target continues the text itself
    eos_token_ids: tuple[int, ...]


def load_tokenizer(target: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            target, local_files_only=True
        )
    except (ValueError, OSError, KeyError) as error:
        raise DistillError(f"cannot load the tokenizer of {target}: {error}") from error
    return tokenizer


def frame(tokenizer: Any, target: str) -> ChatFrame:
    """The frame that the model's own chat template puts around one user turn."""
    try:
        ids = eos_token_ids(Path(target), load_config(target).get_text_config(), tokenizer)
    except ValueError as error:
        raise DistillError(str(error)) from None
    if not ids:
        raise DistillError(f"neither the tokenizer nor a config of {target} has an eos")
    if tokenizer.chat_template is None:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else ids[0]
        return ChatFrame([start], None, ids)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = text.partition(_MARK)
    if not found:
        raise DistillError(f"the chat template of {target} does not show the user's words")
    return ChatFrame(encode(tokenizer, before), encode(tokenizer, after), ids)


def words(tokenizer: Any) -> list[str]:
    """The vocabulary's whole words of small letters, in the order of their ids; at least one."""
    ids: dict[str, int] = tokenizer.get_vocab()
    return [
        token[1:]
        for token in sorted(ids, key=ids.__getitem__)
        if token[:1] in _SPACES and len(token) > _SHORTEST_WORD and _is_word(token[1:])
    ] or ["thing"]


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalpha() and text.islower()


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def user_turns(source: str) -> list[str]:
    """Complete user turns from a text file (one a line), a .jsonl file, or a hub data set.

    JSON lines and data sets have a field `prompt`, or `messages` as in chats.
    """
    path = Path(source)
    if path.is_file():
        turns = list(_turns_of_file(path))
    else:
        turns = [_turn(record, f"a record of {source}") for record in _dataset(source)]
    if not turns:
        raise DistillError(f"prompts: {source} has none")
    return turns


def _turns_of_file(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:  # a text's splitlines would cut at other characters, too
        for number, line in enumerate(lines, 1):
            where = f"line {number} of {path}"
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
                if text.strip():
                    yield _turn(json.loads(text), where) if path.suffix == ".jsonl" else text
            except ValueError as error:
                raise DistillError(f"prompts: {where} cannot be read: {error}") from None


def _dataset(source: str) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("datasets") is None:
        raise DistillError(
            f"prompts: no file {source!r} is here; if it is a data set of the hub, "
            "`pip install datasets` first"
        )
    from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]

    try:
        records = load_dataset(source, split="train", streaming=True)
    except (OSError, ValueError) as error:
        raise DistillError(f"prompts: no file or data set {source!r}: {error}") from error
    yield from itertools.islice(records, _MAX_PROMPTS)


def _turn(record: Any, where: str) -> str:
    """What the user says first in a record."""
    match record:
        case {"prompt": str(prompt)}:
            return prompt
        case {"messages": list(messages)}:
            for message in messages:
                match message:
                    case {"role": "user", "content": str(content)}:
                        return content
    raise DistillError(
        f"prompts: {where} has neither a `prompt` nor `messages` with a user's text: "
        f"{str(record)[:_MOST_SHOWN]}"
    )

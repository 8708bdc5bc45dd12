"""The default pair, fetched and converted for real."""

import itertools
import json
from typing import Any

import pytest
import regex
import torch
from from_pretrained import transformers_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.server.config.settings_loader import load_settings
from outrider.server.evaluation.measure import RAW, held_out_prompts
from outrider.server.models.pair import Pair, prepare_pair

pytestmark = pytest.mark.model

# How llama.cpp splits text for this tokenizer: single digits first, then GPT-2's pattern. HF's own
# splitter is not used here, so that this is a second opinion.
DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

QUESTIONS = [
    "How do plants make their food?",
    "Write a Python function that adds two numbers.",
    "Return a JSON object with a name and an age.",
]
TEXTS = [
    "The year 1984, pages 12-345, 3.14159 and 1e-9.",
    "x1y22z333 2024-11-05T09:30:00Z",
    "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)  # 55\n\n\nprint(f(10))",
    "   leading and trailing spaces   ",
    "don't we'll they'RE I'm 'quoted' he's",
    "naïve café façade Ærøskøbing straße",
    "你好，世界！今天是2024年。",
    "Привет, мир! 42 раза",
    "🙂 👩‍👩‍👧 ½ Ⅻ ² ٣ x²",
    "\t\ttabs\tand\r\nwindows\r\n",
    "$1,234.56 (100%) #7 @user_01 https://a.b/c?d=1&e=22",
    "\u00a0non-breaking\u2003em\u200bzero",
]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return prepare_pair(load_settings(environ={}))


@pytest.fixture(scope="module")
def tokenizer(pair: Pair) -> Any:
    return AutoTokenizer.from_pretrained(pair.target)


@pytest.fixture(scope="module")
def target(pair: Pair) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        pair.target, dtype=torch.float32, **transformers_arguments(pair.target)
    )


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def split_digits(text: str) -> list[str]:
    parts, end = [], 0
    for match in regex.finditer(DIGIT, text):
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]


def merge(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while len(word) > 1:
        rank, at = min(
            (ranks.get((left, right), 1 << 30), i)
            for i, (left, right) in enumerate(itertools.pairwise(word))
        )
        if rank == 1 << 30:
            break
        word = [*word[:at], word[at] + word[at + 1], *word[at + 2 :]]
    return word


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_agrees_with_an_independent_one(
    pair: Pair, tokenizer: Any, text: str
) -> None:
    model = json.loads((pair.target / "tokenizer.json").read_text())["model"]
    ranks = {tuple(pieces): rank for rank, pieces in enumerate(model["merges"])}
    spelling = byte_alphabet()
    expected = [
        model["vocab"][token]
        for part in split_digits(text)
        for word in regex.findall(GPT2, part)
        for token in merge([spelling[byte] for byte in word.encode()], ranks)
    ]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_the_chat_template_and_its_tokens_survive(pair: Pair, tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert pair.vocab_size == 49152
    assert pair.eos_token_ids in ((0, 2), (2,))  # <|endoftext|>, unless an older version made it


@pytest.mark.deep  # as test_end_to_end.py has it say through the server
def test_the_target_speaks_english(target: Any, tokenizer: Any) -> None:
    ids = tokenizer("The capital of France is", return_tensors="pt")
    output = target.generate(**ids, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])


def test_the_draft_is_an_ordinary_small_model_with_the_targets_tokenizer(pair: Pair) -> None:
    assert pair.draft is not None
    draft = AutoModelForCausalLM.from_pretrained(pair.draft)
    assert draft.config.model_type == "llama"
    assert draft.num_parameters() < 20_000_000
    for name in ("tokenizer.json", "LICENSE"):
        assert (pair.draft / name).read_bytes() == (pair.target / name).read_bytes()
    assert "Apache-2.0" in (pair.draft / "NOTICE").read_text()
    assert "held-out" in (pair.draft / "README.md").read_text()


@pytest.mark.deep
@pytest.mark.parametrize(("is_raw", "least"), [(False, 0.35), (True, 0.5)], ids=["chats", "raw"])
def test_the_draft_agrees_with_the_target(
    pair: Pair, target: Any, tokenizer: Any, is_raw: bool, least: float
) -> None:
    draft = AutoModelForCausalLM.from_pretrained(pair.draft, dtype=torch.float32)
    prompts = (
        [tokenizer(turns[0], return_tensors="pt") for turns in held_out_prompts()[RAW]]
        if is_raw
        else [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
            )
            for question in QUESTIONS
        ]
    )
    agreed = []
    for prompt in prompts:
        answer = target.generate(**prompt, max_new_tokens=24, do_sample=False)
        start = prompt["input_ids"].shape[1]
        agreed.append(draft(answer).logits[0, start - 1 : -1].argmax(-1) == answer[0, start:])
    assert torch.cat(agreed).float().mean() > least


def test_the_licence_and_what_was_changed_are_beside_the_weights(pair: Pair) -> None:
    assert "Apache License" in (pair.target / "LICENSE").read_text()
    assert "digit splitting" in (pair.target / "NOTICE").read_text()

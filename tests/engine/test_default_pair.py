"""The default pair in float32: token for token what transformers' `generate` gives."""

from dataclasses import replace
from pathlib import Path

import pytest
from engines import GREEDY, engine_config, is_greedy, run, tokens
from transformers import AutoTokenizer

from outrider.engine.api import ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models.decoder import Decoder
from outrider.server.config.pair_settings import DEFAULT_DRAFT, DEFAULT_TARGET
from outrider.server.models.builtin import BUILTINS, obtain

pytestmark = [pytest.mark.model, pytest.mark.slow]

PARAMS = replace(GREEDY, max_tokens=16, ignore_eos=True)
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    '{"name": "Ada", "age": 36, "languages": [',
    "1, 2, 3, 4, 5, 6, 7,",
    "Once upon a time there was a fox who",
    "Die Hauptstadt von Österreich heißt",
    "日本の首都は",
    "🙂🙃🙂🙃🙂",
    "Q: What is 17 times 3?\nA:",
    "SELECT name, count(*) FROM orders WHERE",
    "the the the the the the the",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "a",
    "\n\n\n",
    "Water boils at 100 degrees. " * 20,
]


@pytest.fixture(scope="module")
def pair() -> tuple[Path, Path]:
    target, draft = (obtain(BUILTINS[n], ignore_progress) for n in (DEFAULT_TARGET, DEFAULT_DRAFT))
    return target, draft


@pytest.fixture(scope="module")
def prompts(pair: tuple[Path, Path]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Engine:
    return Engine(engine_config(*pair, k=3, page_size=4, max_num_batched_tokens=256))


@pytest.fixture(scope="module")
def truth(engine: Engine, pair: tuple[Path, Path], prompts: list[list[int]]) -> list[list[int]]:
    """What the target says without drafts, all of which `generate` would have said."""
    params = replace(PARAMS, num_speculative_tokens=0)
    answers = [tokens(outputs) for outputs in run(engine, prompts, params)]
    assert all(len(answer) == PARAMS.max_tokens for answer in answers)
    assert all(is_greedy(pair[0], *each) for each in zip(prompts, answers, strict=True))
    return answers


# With k = 3 below.
@pytest.mark.parametrize(
    ("proposer", "k"),
    [
        pytest.param("draft_model", 8, marks=pytest.mark.deep),
        pytest.param("draft_model", 1, marks=pytest.mark.sweep),
        pytest.param("suffix", 5, marks=pytest.mark.sweep),
    ],
)
def test_sixteen_at_once_give_what_generate_gives(
    pair: tuple[Path, Path],
    prompts: list[list[int]],
    truth: list[list[int]],
    proposer: str,
    k: int,
) -> None:
    draft = pair[1] if proposer == "draft_model" else None
    config = engine_config(
        pair[0], draft, proposer=proposer, k=k, page_size=16, max_num_batched_tokens=256
    )
    assert [tokens(o) for o in run(Engine(config), prompts, PARAMS)] == truth


def test_our_decoder_runs_both_of_them(engine: Engine) -> None:
    models = engine.worker.pair.target, engine.worker.pair.draft
    assert all(model is not None and isinstance(model, Decoder) for model in models)


@pytest.mark.deep  # transformers' answers take most of it
def test_drafts_and_prefix_hits_change_nothing(
    engine: Engine, prompts: list[list[int]], truth: list[list[int]]
) -> None:
    assert [tokens(o) for o in run(engine, prompts, PARAMS)] == truth
    assert sum(engine.stats().accepted_per_position) > 0
    again = run(engine, prompts[::3], PARAMS)
    assert [tokens(o) for o in again] == truth[::3]
    assert sum(outputs[-1].num_cached_tokens > 0 for outputs in again) > 3


@pytest.mark.sweep  # on tiny models in test_loop.py
def test_preemption_changes_nothing(
    pair: tuple[Path, Path], prompts: list[list[int]], truth: list[list[int]]
) -> None:
    config = engine_config(*pair, k=3, page_size=16, num_pages=22, max_num_batched_tokens=128)
    engine = Engine(replace(config, max_model_len=336))
    assert [tokens(o) for o in run(engine, prompts, PARAMS)] == truth
    assert engine.stats().preemptions > 0

"""Whatever the grammar, a finished text is of it, with speculation on."""

from dataclasses import replace

import pytest
from engines import engine_config, run, tokens
from random_grammars import GRAMMARS, Check, regex_case, schema_case
from tiny_models import save_tiny_model
from tokenizers_for_tests import byte_level_tokenizer

from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine

TOKENIZER = byte_level_tokenizer()
VOCAB = TOKENIZER.backend.get_vocab_size()
EOS = 0
MAX_TOKENS = 120
PROMPT = TOKENIZER.encode("Hello world", add_special_tokens=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    target, draft = (
        save_tiny_model(tmp_path_factory.mktemp("model"), seed=seed, vocab_size=VOCAB)
        for seed in (0, 1)
    )
    config = engine_config(target, draft, k=3, max_num_seqs=16, max_num_batched_tokens=256)
    return Engine(replace(config, token_table=TOKENIZER.token_table(VOCAB), eos_token_ids=(EOS,)))


def check(engine: Engine, cases: list[tuple[str, Check]]) -> None:
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            grammar=grammar,
            seed=i,
            temperature=[1.0, 0.0, 2.0][i % 3],
            verification=["token", "block", "match"][i // 3 % 3],
        )
        for i, (grammar, _) in enumerate(cases)
    ]
    num_finished = 0
    for outputs, (grammar, is_right) in zip(
        run(engine, [PROMPT] * len(cases), params), cases, strict=True
    ):
        assert outputs[-1].finish_reason in ("stop", "length"), (grammar, outputs[-1].error)
        if outputs[-1].finish_reason == "stop":
            text = TOKENIZER.decode(tokens(outputs)[:-1], skip_special_tokens=False)
            assert is_right(text), (grammar, text)
            num_finished += 1
    assert num_finished > len(cases) / 2
    assert sum(engine.stats().accepted_per_position) > 0


def test_random_schemas(engine: Engine) -> None:
    check(engine, [schema_case(seed) for seed in range(20)])


def test_regexes_and_grammars(engine: Engine) -> None:
    check(engine, [*(regex_case(seed) for seed in range(10)), *GRAMMARS])


@pytest.mark.sweep
def test_two_hundred_random_schemas(engine: Engine) -> None:
    check(engine, [schema_case(seed) for seed in range(200)])


@pytest.mark.sweep
def test_fifty_random_regexes(engine: Engine) -> None:
    check(engine, [regex_case(seed) for seed in range(50)])

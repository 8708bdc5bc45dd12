"""A slow grammar delays the sequences of others no further than its allowance."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engines import GREEDY, engine_config, run, tokens
from random_grammars import GRAMMARS, regex_case, schema_case
from tokenizers_for_tests import byte_level_tokenizer

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.grammars.allowance import Allowance

TOKENIZER = byte_level_tokenizer()
VOCAB = TOKENIZER.backend.get_vocab_size()
PROMPT = TOKENIZER.encode("The quick brown fox", add_special_tokens=False)
SLOW, FAST = "start: /[a-z]+/", "start: /[0-9]+/"


@pytest.fixture
def make(tiny_model: Callable[..., Path]) -> Callable[[str], Engine]:
    def make(proposer: str) -> Engine:
        target, draft = (tiny_model("llama", seed=seed, vocab_size=VOCAB) for seed in (0, 1))
        config = engine_config(
            target, draft if proposer == "draft_model" else None, proposer=proposer, k=3
        )
        table = TOKENIZER.token_table(VOCAB)
        return Engine(replace(config, token_table=table, eos_token_ids=(0,)))

    return make


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Allowance, int]]]:
    """The questions of each step's batches, each of which takes as long as a slow mask."""
    asked: list[tuple[Allowance, int]] = []
    charge = Allowance.charge

    def slow(self: Allowance, spent_s: float, num_questions: int) -> None:
        asked.append((self, num_questions))
        charge(self, 0.02 * num_questions, num_questions)

    monkeypatch.setattr(Allowance, "charge", slow)
    return asked


def test_a_slow_grammar_takes_no_more_than_its_share_of_each_step(
    make: Callable[[str], Engine], spent: list[tuple[Allowance, int]]
) -> None:
    engine = make("draft_model")
    slow = replace(GREEDY, grammar=SLOW, max_tokens=200, ignore_eos=True)
    free = replace(GREEDY, max_tokens=60, num_speculative_tokens=0)
    run(engine, [PROMPT], replace(slow, max_tokens=1))  # compiles it
    spent.clear()
    engine.submit(
        [
            NewRequest(request_id=name, prompt_token_ids=PROMPT, params=params)
            for name, params in (("a", slow), ("b", slow), ("free", free), ("c", slow))
        ]
    )
    got = dict.fromkeys(["a", "b", "c", "free"], 0)
    num_steps = 0
    while "free" in engine.sequences.by_id:
        for output in engine.step():
            got[output.request_id] += len(output.token_ids)
        num_steps += bool(got["free"])
    num_questions = sum(num for _, num in spent)
    # 20 ms a question, 10 ms a step; what comes before they are known to be slow is paid off.
    assert num_steps / 2 - 2 <= num_questions <= num_steps / 2 + 2
    assert got["free"] == 60
    assert num_steps <= 61  # it was in every step
    others = [got[name] for name in "abc"]
    assert min(others) > 0  # they took turns
    assert max(others) - min(others) <= 4
    engine.abort(["a", "b", "c"])
    engine.check_integrity()


def test_a_slow_grammar_that_is_alone_may_take_its_time(
    make: Callable[[str], Engine], spent: list[tuple[Allowance, int]]
) -> None:
    slow = replace(GREEDY, grammar=SLOW, max_tokens=20, ignore_eos=True, num_speculative_tokens=0)
    engine = make("none")
    run(engine, [PROMPT] * 2, slow)
    assert len(spent) == 20  # both in every step


def test_an_ordinary_grammar_never_sits_out() -> None:
    allowance = Allowance()
    for _ in range(50):
        allowance.begin_step()
        taken = [allowance.take(4) for _ in range(64)]
        allowance.charge(0.00005 * sum(taken), sum(taken))
    assert taken == [4] * 64


@pytest.mark.parametrize(("proposer", "lag"), [("draft_model", 0), ("suffix", 1)])
def test_sitting_out_changes_no_token(
    make: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch, lag: int, proposer: str
) -> None:
    cases = [*(schema_case(seed) for seed in range(6)), *(regex_case(seed) for seed in range(4))]
    params = [
        SamplingParams(
            max_tokens=40,
            grammar=grammar,
            seed=i,
            temperature=[1.0, 0.0, 2.0][i % 3],
            verification="match",
            num_speculative_tokens=[3, 0, 2][i // 3 % 3],
        )
        for i, (grammar, _) in enumerate([*cases, *GRAMMARS[:4]])
    ]
    truth = [tokens(o) for o in run(make(proposer), [PROMPT] * len(params), params)]
    rng, sat_out = random.Random(lag), []

    def take(self: Allowance, wanted: int) -> int:
        taken = rng.choice([0, 0, 1, wanted])
        sat_out.append(taken == 0)
        return taken

    monkeypatch.setattr(Allowance, "take", take)
    engine = make(proposer)
    engine.scheduler.lag = lag
    found = [tokens(o) for o in run(engine, [PROMPT] * len(params), params)]
    assert found == truth
    assert sum(sat_out) > 100
    engine.check_integrity()

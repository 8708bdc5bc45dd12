"""Prompts are cut so that steps with others' tokens take no longer than is allowed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import VOCAB

from outrider.engine.api import NewRequest
from outrider.engine.engine import Engine
from outrider.engine.scheduling.chunks import FEWEST_ROWS, Chunks

BASE_S, ROW_S, FLAT_ROWS = 0.010, 0.0001, 150  # a pass is bound by memory up to FLAT_ROWS


def step_s(num_rows: int, slower: float = 1.0) -> float:
    return slower * (BASE_S + ROW_S * max(0, num_rows - FLAT_ROWS))


def settled(chunks: Chunks, slower: float = 1.0, num_steps: int = 12) -> int:
    for _ in range(num_steps):
        assert chunks.most_rows is not None
        chunks.observe(chunks.most_rows, step_s(chunks.most_rows, slower))
    assert chunks.most_rows is not None
    return chunks.most_rows


def test_steps_come_to_take_what_is_allowed() -> None:
    chunks = Chunks(0.050)
    num_rows = settled(chunks)
    assert 0.043 < step_s(num_rows) <= 0.050
    # Contexts grow, so that rows cost more; then they are short again.
    assert 0.043 < step_s(settled(chunks, 1.5), 1.5) <= 0.050
    assert settled(chunks) == pytest.approx(num_rows, rel=0.05)


def test_no_step_takes_too_long_before_any_was_timed() -> None:
    """As on a CPU, where 128 rows of a small model take 0.4 s."""
    chunks = Chunks(0.150)
    for _ in range(12):
        assert chunks.most_rows is not None
        took_s = 0.020 + 0.003 * chunks.most_rows
        assert took_s < 0.155
        chunks.observe(chunks.most_rows, took_s)
    assert took_s > 0.130


def test_a_step_that_took_too_long_is_followed_by_a_short_one() -> None:
    chunks = Chunks(0.050)
    chunks.observe(4096, step_s(4096))  # nobody decoded
    assert chunks.most_rows is not None
    assert step_s(chunks.most_rows) < 0.055


def test_the_end_of_a_prompt_changes_nothing() -> None:
    chunks = Chunks(0.050)
    before = settled(chunks)
    chunks.observe(3, step_s(3))
    chunks.observe(0, 10.0)
    assert chunks.most_rows == before


def test_a_prompt_goes_on_even_if_decoding_alone_takes_too_long() -> None:
    chunks = Chunks(0.005)
    assert settled(chunks) == FEWEST_ROWS


def test_chunks_are_cut_beside_others_alone_and_answers_stay(target: Path) -> None:
    long, short = prompts([150, 6], VOCAB)
    config = engine_config(target, proposer="none", max_num_batched_tokens=64)
    expected = [tokens(run(Engine(config), [prompt], GREEDY)[0]) for prompt in (long, short)]
    config = replace(config, scheduler=replace(config.scheduler, max_itl_ms=1e-6))
    engine = Engine(config)
    assert tokens(run(engine, [long], GREEDY)[0]) == expected[0]
    alone = engine.stats()
    assert alone.steps == 3 + GREEDY.max_tokens - 1  # 64 rows each, as nobody waited

    engine = Engine(config)
    drawn: dict[str, list[int]] = {"short": [], "long": []}
    computed = []
    for name, prompt in (("short", short), ("long", long)):
        engine.submit([NewRequest(request_id=name, prompt_token_ids=prompt, params=GREEDY)])
        engine.step()
    while engine.has_work():
        for output in engine.step():
            drawn[output.request_id] += output.token_ids
        if (running := engine.sequences.by_id.get("long")) and not drawn["long"]:
            computed.append(running.memory.num_computed_tokens)
            assert drawn["short"]
    assert max(np.diff(computed)) == FEWEST_ROWS
    assert drawn["long"] == expected[0]
    assert drawn["short"] == expected[1][-len(drawn["short"]) :]

"""How far a prompt is computed, step by step, for those who ask."""

from pathlib import Path

import pytest
from engines import GREEDY, engine_config, lagging, prompts
from tiny_models import VOCAB

from outrider.engine.api import NewRequest, RequestOutput
from outrider.engine.engine import Engine

[LONG] = prompts([40], VOCAB)


def outputs_of(engine: Engine, prompt: list[int], *, asks: bool) -> list[RequestOutput]:
    request = NewRequest(
        request_id="a", prompt_token_ids=prompt, params=GREEDY, reports_prompt=asks
    )
    engine.submit([request])
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("lags", [False, True])
def test_each_step_of_a_prompt_is_reported_until_the_first_token(
    target: Path, draft: Path, lags: bool
) -> None:
    config = engine_config(target, draft, max_num_batched_tokens=16)
    engine = lagging(config) if lags else Engine(config)
    outputs = outputs_of(engine, LONG, asks=True)
    reports = [output.num_computed_prompt_tokens for output in outputs]
    assert reports[:3] == [16, 32, 40]
    assert set(reports[3:]) == {None}
    assert [bool(output.token_ids) for output in outputs[:3]] == [False, False, True]
    # What the cache has is computed already.
    again = outputs_of(engine, [*LONG, *LONG[:3]], asks=True)
    assert again[0].num_computed_prompt_tokens == len(LONG) + 3
    assert again[0].num_cached_tokens >= len(LONG) - 4


def test_steps_are_counted_by_their_tokens(target: Path) -> None:
    engine = Engine(engine_config(target, max_num_batched_tokens=16))
    outputs = outputs_of(engine, LONG, asks=False)
    stats = engine.stats()
    num_generated = len(outputs)  # one a step
    assert stats.step_tokens == len(LONG) + num_generated
    # 16 and 16 tokens of the prompt; its last 8 and the first token; the other tokens.
    assert stats.steps_by_tokens[:4] == [num_generated - 1, 0, 3, 0]
    assert sum(stats.steps_by_tokens) == stats.steps


def test_nothing_is_reported_unasked(target: Path, draft: Path) -> None:
    config = engine_config(target, draft, max_num_batched_tokens=16)
    outputs = outputs_of(Engine(config), LONG, asks=False)
    assert all(output.num_computed_prompt_tokens is None for output in outputs)
    assert all(output.token_ids for output in outputs)

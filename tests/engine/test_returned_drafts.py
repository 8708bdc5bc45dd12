"""Outputs of sequences that ask for it say what was drafted: accepted and rejected drafts alike."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from engines import GREEDY, engine_config, generate, prompts, tokens
from tiny_models import DEVICE, VOCAB, Tiny

from outrider.engine.api import NewRequest, RequestOutput, SamplingParams
from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.compiled_decoder import CompiledDecoder
from outrider.engine.proposers.draft_model import DraftModel
from outrider.kernels.cpu.layers import compiled

K = 3
PROMPTS = prompts([7, 20, 3], VOCAB)
EDITED = replace(GREEDY, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def pair(tiny_model: Tiny) -> tuple[Path, Path]:
    """Some drafts are accepted and some are not."""
    return tiny_model("llama", seed=0), tiny_model("llama", seed=0, num_hidden_layers=1)


def run(
    engine: Engine, params: list[SamplingParams], returning: tuple[int, ...]
) -> list[list[RequestOutput]]:
    engine.submit(
        [
            NewRequest(
                request_id=str(i), prompt_token_ids=prompt, params=p, returns_drafts=i in returning
            )
            for i, (prompt, p) in enumerate(zip(PROMPTS, params, strict=True))
        ]
    )
    outputs: list[list[RequestOutput]] = [[] for _ in PROMPTS]
    while engine.has_work():
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
    return outputs


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("edited", [False, True])
def test_drafts_are_those_of_the_draft_model(
    pair: tuple[Path, Path], ahead: bool, edited: bool
) -> None:
    engine = Engine(engine_config(*pair, k=K))
    engine.scheduler.lag = int(ahead)
    outputs = run(engine, [GREEDY, EDITED if edited else GREEDY, GREEDY], returning=(0, 2))
    rejected = 0
    for prompt, returned in [(PROMPTS[i], outputs[i]) for i in (0, 2)]:
        known, num_accepted = list(prompt), 0
        for output in returned:
            drafts = output.draft_token_ids
            assert drafts is not None
            assert drafts == (generate(pair[1], known, len(drafts)) if drafts else [])
            accepted = output.num_accepted_tokens - num_accepted
            assert drafts[:accepted] == output.token_ids[:accepted]
            if accepted < len(drafts) and accepted < len(output.token_ids):
                assert drafts[accepted] != output.token_ids[accepted]
                rejected += 1
            known += output.token_ids
            num_accepted = output.num_accepted_tokens
        assert sum(len(output.draft_token_ids or ()) for output in returned) == (
            returned[-1].num_draft_tokens
        )
        assert returned[-1].num_accepted_tokens > 0
    assert rejected > 0
    assert all(output.draft_token_ids is None for output in outputs[1])


def test_an_edited_sequence_returns_its_drafts_too(pair: tuple[Path, Path]) -> None:
    engine = Engine(engine_config(*pair, k=K))
    returned = run(engine, [EDITED, GREEDY, EDITED], returning=(0,))[0]
    num_accepted = 0
    for output in returned:
        accepted, drafts = output.num_accepted_tokens - num_accepted, output.draft_token_ids
        assert drafts is not None
        assert drafts[:accepted] == output.token_ids[:accepted]
        num_accepted = output.num_accepted_tokens
    assert (
        sum(len(output.draft_token_ids or ()) for output in returned)
        == returned[-1].num_draft_tokens
    )


def test_returning_drafts_changes_nothing(pair: tuple[Path, Path]) -> None:
    params = [GREEDY, EDITED, replace(GREEDY, temperature=1.0, seed=7, logprobs=2)]
    silent, returned = (
        run(Engine(engine_config(*pair, k=K)), params, returning) for returning in ((), (0, 1, 2))
    )
    assert list(map(tokens, silent)) == list(map(tokens, returned))
    assert [o.logprobs for o in silent[2]] == [o.logprobs for o in returned[2]]


def test_without_drafts_the_list_is_empty(pair: tuple[Path, Path]) -> None:
    plain = [replace(GREEDY, num_speculative_tokens=0)] * 3
    for engine in (Engine(engine_config(*pair, k=K)), Engine(engine_config(pair[0]))):
        for outputs in run(engine, plain, returning=(0, 1, 2)):
            assert all(output.draft_token_ids == [] for output in outputs)


def test_drafts_of_prompt_lookup_are_returned(pair: tuple[Path, Path]) -> None:
    engine = Engine(engine_config(pair[0], proposer="suffix", k=K))
    outputs = run(engine, [replace(GREEDY, max_tokens=60)] * 3, returning=(0, 1, 2))
    num_announced = [sum(len(o.draft_token_ids or ()) for o in each) for each in outputs]
    assert num_announced == [each[-1].num_draft_tokens for each in outputs]
    assert sum(num_announced) > 0


@pytest.mark.skipif(
    compiled() is None or DEVICE.type != "cpu", reason="the CPU's layers are not compiled"
)
@pytest.mark.usefixtures("short_tables")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_one_call_are_those_drawn_in_turn(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    in_one_call = Mock(wraps=CompiledDecoder.draft_in_slots)
    monkeypatch.setattr(CompiledDecoder, "draft_in_slots", lambda *args: in_one_call(*args))
    target, draft = tiny_model("qwen3"), tiny_model("qwen3", num_hidden_layers=1)
    # No step, not even that of warm-up, has more rows than the shortest tables.
    config = engine_config(target, draft, k=K, max_num_batched_tokens=8, max_num_seqs=3)
    config = replace(config, draft=ModelConfig(path=str(draft)))
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=i, num_speculative_tokens=k)
        for i, k in enumerate((None, 1, None))
    ]
    returned = []
    for is_one_call in (True, False):
        engine = Engine(config)
        source = engine.worker.proposer.sources[-1]
        assert isinstance(source, DraftModel)
        assert source._is_compiled
        source._is_compiled = is_one_call
        engine.scheduler.drafting.least_chance = 0.01
        outputs = run(engine, params, returning=(0, 1, 2))
        returned.append([(o.token_ids, o.draft_token_ids) for each in outputs for o in each])
        assert (in_one_call.call_count > 0) == is_one_call
        in_one_call.reset_mock()
    assert returned[0] == returned[1]
    lens = [len(drafts) for _, drafts in returned[0] if drafts is not None]
    assert {1, 2, K} <= set(lens)  # some end early

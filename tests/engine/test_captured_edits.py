"""Edits that need no host are made within the phases of a step, for drafts of every kind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from block_heads import save_tiny_block_head
from engines import GREEDY, engine_config, prompts
from heads import save_tiny_head
from tiny_models import DEVICE, Tiny

from outrider.engine.api import NewRequest, SamplingParams, ThinkingBudget, Verification
from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.logit_edits import LogitEdits

ON_GPU = DEVICE.type == "cuda"
K = 3
VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "scale": 0.06,
}
PROMPTS = prompts([9, 30, 3, 17, 40, 5, 21, 8], VOCAB)
EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    {"logit_bias": dict.fromkeys(range(40), 1.5), "min_tokens": 9, "stop_token_ids": (7, 9)},
    {"bad_words": ((3, 4), (5,), (6, 7, 8)), "allowed_token_ids": tuple(range(300))},
    {
        "thinking": ThinkingBudget(num_tokens=5, open_token_id=0, close_token_id=9, begun=True),
        "frequency_penalty": 0.6,
        "logit_bias": {11: 2.0},
    },
]
PLAIN = replace(GREEDY, ignore_eos=True, logprobs=2)
HEADS: dict[str, Callable[[Path, Path], Path]] = {
    "eagle3": lambda path, target: save_tiny_head(
        path, target, draft_vocab=400, boundaries=(1, 2), scale=0.06
    ),
    "peagle": lambda path, target: save_tiny_head(
        path, target, parallel=True, boundaries=(1, 2), scale=0.06
    ),
    "dflash": lambda path, target: save_tiny_block_head(
        path, target, boundaries=(1, 2), scale=0.06
    ),
    "dspark": lambda path, target: save_tiny_block_head(
        path, target, markov="vanilla", confidence="token", boundaries=(1, 2), scale=0.06
    ),
}
KINDS = ["draft_model", *HEADS]
Answer = list[tuple[Any, ...]]


@pytest.fixture
def config_of(tiny_model: Tiny, tmp_path: Path) -> Callable[[str], EngineConfig]:
    def config(kind: str) -> EngineConfig:
        target = tiny_model("llama", **SHAPE)
        draft = tiny_model("llama", **SHAPE | {"scale": 0.066})
        if kind in HEADS:
            draft = HEADS[kind](tmp_path / kind, target)
        made = engine_config(target, draft, k=K, max_num_seqs=9, max_num_batched_tokens=256)
        if not ON_GPU:
            return made
        # In the dtype in which no bits depend on the batch.
        models = (ModelConfig(path=str(path), dtype="bfloat16") for path in (target, draft))
        of_target, of_draft = models
        return replace(made, target=of_target, draft=of_draft, batch_invariant=True)

    return config


def params_of(rule: Verification, temperature: float) -> list[SamplingParams]:
    """Every second one has edits."""
    base = replace(PLAIN, temperature=temperature, verification=rule)
    each = [replace(base, seed=i, top_k=40 * (i == 2)) for i in range(len(EDITS))]
    return [p for own, edit in zip(each, EDITS, strict=True) for p in (own, replace(own, **edit))]


def unedited(params: list[SamplingParams]) -> list[SamplingParams]:
    """The same, of which none has edits."""
    return [params[i - i % 2] for i in range(len(params))]


def answers(engine: Engine, params: list[SamplingParams]) -> list[Answer]:
    """What each step made of each request: its tokens, their logprobs, and all drafts."""
    asked = zip(PROMPTS, params, strict=True)
    engine.submit(
        [
            NewRequest(request_id=str(i), prompt_token_ids=prompt, params=p, returns_drafts=True)
            for i, (prompt, p) in enumerate(asked)
        ]
    )
    found: list[Answer] = [[] for _ in PROMPTS]
    while engine.has_work():
        for output in engine.step():
            step = output.token_ids, output.logprobs, output.draft_token_ids
            found[int(output.request_id)].append(step)
    engine.check_integrity()
    return found


def drafts_of(answer: Answer) -> set[int]:
    return {draft for *_, drafts in answer for draft in drafts}


def of_tokens(answer: Answer) -> list[Any]:
    """Its tokens and their logprobs; which step gave them depends on its drafts."""
    return [each for ids, logprobs, _ in answer for each in zip(ids, logprobs, strict=True)]


@pytest.mark.skipif(ON_GPU, reason="there the rounding of drafts may depend on their batch")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_edited_as_if_each_were_drawn_by_itself(
    kind: str, config_of: Callable[[str], EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(config_of(kind))
    params = params_of("block", 1.0)
    together = answers(engine, params)
    # As if all edits needed the host, which then draws one draft after the other.
    monkeypatch.setattr(LogitEdits, "needing_host", LogitEdits.asked_by)
    in_turn = answers(engine, params)
    assert together == in_turn
    assert sum(len(drafts) for answer in together for *_, drafts in answer) > 100
    monkeypatch.setattr(LogitEdits, "edit_drafts", lambda *_: None)
    monkeypatch.setattr(LogitEdits, "needing_host", lambda _, slots_np: slots_np < 0)
    assert answers(engine, params) != together  # so the edits of drafts matter here


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_edit_as_launches_one_by_one_do(
    kind: str, config_of: Callable[[str], EngineConfig]
) -> None:
    captured = Engine(config_of(kind))
    eager = Engine(replace(config_of(kind), enforce_eager=True))
    without_bans: set[int] = set()
    for temperature in (0.0, 1.0):
        params = params_of("match", temperature)
        found = answers(captured, params)
        assert [*map(of_tokens, found)] == [*map(of_tokens, answers(eager, params))]
        # A draft's rounding may depend on padding. But its bans hold.
        allowed = {*params[5].allowed_token_ids} - {5}
        drafts = drafts_of(found[5])
        assert drafts
        assert drafts <= allowed
        without_bans |= drafts_of(answers(captured, unedited(params))[5])
    assert not without_bans <= allowed  # so the bans matter here


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "dflash"])
def test_an_edited_neighbour_changes_no_bit(
    kind: str, config_of: Callable[[str], EngineConfig]
) -> None:
    engine = Engine(config_of(kind))
    for temperature in (0.0, 1.0):
        params = params_of("match", temperature)
        beside, alone = answers(engine, params), answers(engine, unedited(params))
        for i in range(len(params)):
            assert (of_tokens(beside[i]) == of_tokens(alone[i])) == (i % 2 == 0), i

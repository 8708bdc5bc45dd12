"""What fails in the loop, or is refused, hurts nobody else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, engine_config, generate, prompts, run, tokens
from tiny_models import VOCAB, Tiny
from transformers import AutoModelForCausalLM

from outrider.engine.api import InvalidRequestError, NewRequest, QueueFullError, RequestOutput
from outrider.engine.config import ConfigError
from outrider.engine.engine import Engine
from outrider.engine.plan import Plan

MIXED = prompts([3, 40, 1, 17, 90, 8], VOCAB)


@pytest.fixture(scope="module")
def truth(target: Path) -> list[list[int]]:
    return [generate(target, prompt, GREEDY.max_tokens) for prompt in MIXED]


def test_a_draft_that_fails_costs_nobody_the_request(
    target: Path, draft: Path, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(engine_config(target, draft))

    def fail(batch: object) -> None:
        raise RuntimeError("no draft today")

    assert engine.worker.pair.draft is not None
    monkeypatch.setattr(engine.worker.pair.draft, "forward", fail)
    assert [tokens(o) for o in run(engine, MIXED, GREEDY)] == truth


@pytest.fixture(scope="module")
def poison(truth: list[list[int]]) -> int:
    return next(t for t in range(VOCAB) if t not in MIXED[1] + truth[1])


@pytest.fixture(scope="module")
def poisoned(target: Path, poison: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, but one token makes it NaN."""
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    path = tmp_path_factory.mktemp("poisoned")
    model.save_pretrained(path)
    return path


def test_a_nan_row_fails_that_request_only(
    poisoned: Path, poison: int, draft: Path, truth: list[list[int]]
) -> None:
    engine = Engine(engine_config(poisoned, draft))
    bad, good = run(engine, [[1, poison, 2], MIXED[1]], GREEDY)
    assert bad[-1].finish_reason == "error"
    assert "no finite logits" in (bad[-1].error or "")
    assert tokens(good) == truth[1]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_draft_that_makes_the_target_nan_costs_nobody_the_request(
    poisoned: Path,
    poison: int,
    draft: Path,
    truth: list[list[int]],
    lag: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It spoils KV of tokens before it, in pages that another sequence finds at once."""
    engine = Engine(engine_config(poisoned, draft, k=1))
    engine.scheduler.lag = lag
    slots = engine.worker.slots

    def propose(plan: Plan) -> list[int]:
        for each in plan.emitting:
            if each.max_drafts:
                slots.token_ids[each.slot, slots.num_tokens[each.slot]] = poison
        return [each.max_drafts for each in plan.scheduled]

    monkeypatch.setattr(engine.worker.proposer, "propose", propose)
    text = MIXED[1] + truth[1]
    # In the lagging engine drafts come after the first token. Either way the token before the draft
    # fills a page.
    lengths = {"spoilt": 44 - lag, "shares": 45}
    outputs: list[RequestOutput] = []
    for name, length in lengths.items():
        params = replace(GREEDY, max_tokens=len(text) - length)
        engine.submit([NewRequest(request_id=name, prompt_token_ids=text[:length], params=params)])
        outputs += [output for _ in range(1 + lag) for output in engine.step()]
    while engine.has_work():
        outputs += engine.step()
    for name, length in lengths.items():
        assert tokens([o for o in outputs if o.request_id == name]) == text[length:]
    engine.check_integrity()


def test_abort_frees_everything_at_once(target: Path, draft: Path) -> None:
    engine = Engine(engine_config(target, draft, max_num_seqs=2))
    new = [
        NewRequest(request_id=str(i), prompt_token_ids=MIXED[1], params=GREEDY) for i in range(4)
    ]
    engine.submit(new)
    engine.step()
    engine.abort(["0", "3", "unknown"])
    engine.check_integrity()
    engine.abort(["1", "2", "2"])
    assert not engine.has_work()
    assert engine.stats().pages_used == 0
    engine.check_integrity()


def test_a_full_queue_turns_a_group_away_whole(target: Path) -> None:
    engine = Engine(engine_config(target, max_num_seqs=2, max_queue_len=3))

    def group(name: str, n: int) -> list[NewRequest]:
        return [
            NewRequest(request_id=f"{name}{i}", prompt_token_ids=[1, 2], params=GREEDY)
            for i in range(n)
        ]

    engine.submit(group("a", 4))
    with pytest.raises(QueueFullError, match="4 wait"):
        engine.submit(group("b", 2))
    engine.submit(group("c", 1))
    while engine.has_work():
        engine.step()
    assert engine.stats().generation_tokens == 5 * GREEDY.max_tokens


def test_ids_in_use_are_refused(target: Path) -> None:
    engine = Engine(engine_config(target))
    a, b = (NewRequest(request_id=i, prompt_token_ids=[1], params=GREEDY) for i in "ab")
    engine.submit([a])
    for taken in ([b, a], [b, b]):
        with pytest.raises(InvalidRequestError, match="in use already"):
            engine.submit(taken)
    assert engine.stats().num_waiting == 1


@pytest.mark.parametrize(
    ("prompt", "change", "field"),
    [
        ([], {}, "prompt"),
        ([1, VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"min_p": 1.5}, "min_p"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"logprobs": 1000}, "logprobs"),
        ([1], {"logprobs": 0, "logprob_token_ids": (VOCAB,)}, "logprob_token_ids"),
        ([1], {"logprobs": 0, "logprob_token_ids": (0,) * 129}, "logprob_token_ids"),
        ([1], {"logprob_token_ids": (0,)}, "logprob_token_ids"),
    ],
)
def test_bad_input_is_refused_by_name(
    target: Path, prompt: list[int], change: dict[str, float], field: str
) -> None:
    engine = Engine(engine_config(target))
    bad = NewRequest(
        request_id="bad",
        prompt_token_ids=prompt,
        params=replace(GREEDY, **change),  # type: ignore[arg-type]
    )
    with pytest.raises(InvalidRequestError, match=f"^{field}"):
        engine.submit([bad])
    assert not engine.has_work()


def test_more_drafts_than_can_be_verified_are_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 33; it must be at most 32"):
        Engine(engine_config(target, target, k=33))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_can_have_an_engine(tiny_model: Tiny) -> None:
    config = engine_config(tiny_model("llama", seed=0), tiny_model("llama", seed=1))
    asked = prompts([5, 40, 12], VOCAB)
    try:
        on_second, on_first = (
            [tokens(out) for out in run(Engine(replace(config, device=device)), asked, GREEDY)]
            for device in ("cuda:1", "cuda:0")
        )
    finally:
        torch.cuda.set_device(0)
    assert on_second == on_first

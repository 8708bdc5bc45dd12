"""An engine whose evicted pages go to host memory and come back: nobody's answer changes."""

import logging
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from engines import GREEDY, engine_config, lagging, prompts, run, tokens
from heads import save_tiny_head
from host_copies import FailingCopies, LateCopies, with_copies, with_late_copies
from tiny_models import VOCAB, Tiny

from outrider.engine import host_memory, seats, start_up
from outrider.engine.api import NewRequest, RequestOutput, SamplingParams, SourceName
from outrider.engine.config import ConfigError, EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.models import pair

PAGE = 4
HOST_GIB = 0.002
GREEDY = replace(GREEDY, max_tokens=12)
ASKED = prompts([61, 47, 55, 39], VOCAB)
PARAMS = [
    GREEDY,
    replace(GREEDY, logprobs=2),
    SamplingParams(max_tokens=12, seed=3, verification="match", prompt_logprobs=1),
    SamplingParams(max_tokens=12, seed=4, temperature=0.7, verification="match", logprobs=1),
]


def tiered(config: EngineConfig, host_gib: float = HOST_GIB) -> EngineConfig:
    cache = replace(config.cache, host_gib=host_gib)
    # A GPU sums alike in 16 bits alone.
    return replace(config, cache=cache, batch_invariant=not torch.cuda.is_available())


def whole(outputs: list[RequestOutput]) -> list[object]:
    entries = [e for o in outputs for e in (*(o.prompt_logprobs or ()), *(o.logprobs or ()))]
    return [tokens(outputs), entries]


def save_draft(kind: str, target: Path, folder: Path, draft: Path) -> Path | None:
    if kind == "eagle3":
        return save_tiny_head(folder, target, boundaries=(0, 1, 2))
    return draft if kind == "draft_model" else None


@pytest.mark.skipif(torch.cuda.is_available(), reason="no equal bits in float32 there")
@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "windows"])
def test_returned_prompts_are_answered_alike(
    kind: str, target: Path, draft: Path, tmp_path: Path, tiny_model: Tiny
) -> None:
    """Chunks, drafts, and other sequences beside it; more than half of all prompts come back."""
    if kind == "windows":
        layer_types = ["full_attention", "sliding_attention"]
        target = tiny_model(
            "qwen3", sliding_window=8, use_sliding_window=True, layer_types=layer_types
        )
    proposer = "suffix" if kind == "windows" else "draft_model"
    of_drafts = save_draft(kind, target, tmp_path / "draft", draft)
    config = engine_config(
        target, of_drafts, k=3, proposer=proposer, num_pages=32, max_num_batched_tokens=16
    )
    alone = Engine(
        replace(tiered(config, 0), cache=replace(config.cache, num_pages=400, prefix_caching=False))
    )
    expected = [whole(run(alone, [p], q)[0]) for p, q in zip(ASKED, PARAMS, strict=True)]
    engine = with_late_copies(lagging(tiered(config)), random.Random(kind))
    for _ in range(2):
        got = [whole(outputs) for outputs in run(engine, ASKED, PARAMS)]
        assert got == expected
    for prompt, params, answer in zip(ASKED, PARAMS, expected, strict=True):
        outputs = run(engine, [prompt], params)[0]
        assert whole(outputs) == answer
        if params.prompt_logprobs is None:
            assert outputs[-1].num_cached_tokens >= len(prompt) - 2 * PAGE
    stats = engine.stats()
    assert stats.host_loaded_tokens > 60
    assert stats.host_saved_tokens >= stats.host_pages_used * PAGE > 60
    if kind != "windows":
        assert sum(stats.accepted_per_position) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="no equal bits in float32 there")
def test_an_agent_that_returns_twenty_times_is_answered_alike(target: Path, draft: Path) -> None:
    """Each turn is the conversation so far and a little more, and finds it evicted."""
    config = engine_config(target, draft, k=2, num_pages=60)
    alone = Engine(replace(config, batch_invariant=True, cache=replace(config.cache, num_pages=99)))
    engine = with_late_copies(lagging(tiered(config)), random.Random(1))
    rng, params = random.Random(2), replace(GREEDY, max_tokens=4, logprobs=1)
    prompt, num_before = rng.choices(range(VOCAB), k=30), 0
    for _ in range(20):
        alone.start_over()
        outputs = run(engine, [prompt], params)[0]
        assert whole(outputs) == whole(run(alone, [prompt], params)[0])
        assert outputs[-1].num_cached_tokens >= num_before - PAGE
        num_before = len(prompt)
        prompt = [*prompt, *tokens(outputs), *rng.choices(range(VOCAB), k=5)]
        run(engine, [rng.choices(range(VOCAB), k=220)], replace(GREEDY, max_tokens=1))
    assert engine.stats().host_loaded_tokens > 20 * 60
    engine.check_integrity()


def begin(engine: Engine, name: str, prompt: list[int]) -> None:
    engine.submit([NewRequest(request_id=name, prompt_token_ids=prompt, params=GREEDY)])


def test_others_go_on_while_pages_come_back(target: Path) -> None:
    engine = lagging(tiered(engine_config(target, num_pages=40, proposer="none")))
    run(engine, ASKED[:1], GREEDY)
    run(engine, ASKED[1:3], GREEDY)
    engine = engine_with_memory(engine)
    begin(engine, "other", ASKED[3])
    engine.step()
    begin(engine, "back", ASKED[0])
    begin(engine, "short", [1, 2, 3])
    drawn = {"other": 0, "back": 0, "short": 0}
    for _ in range(8):
        for output in engine.step():
            drawn[output.request_id] += len(output.token_ids)
    assert drawn["back"] == 0
    assert drawn["other"] >= 6
    assert drawn["short"] >= 6
    engine.abort(["back"])  # its pages come nevertheless, and are free then
    while engine.has_work():
        engine.step()
    engine.check_integrity()
    begin(engine, "again", ASKED[0])
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].num_cached_tokens == 60
    engine.check_integrity()
    assert engine.stats().pages_used == 0


def engine_with_memory(engine: Engine) -> Engine:
    """The same engine with the same cache, whose pages come back after ten steps."""
    memory, found = engine.sequences.memory, engine.worker.host_pages
    assert memory.host is not None
    assert found is not None
    memory.host._copies = LateCopies(found[1], lambda: 10)
    return engine


def test_a_sequence_alone_is_seated_while_its_pages_come_back(target: Path) -> None:
    """The device waits for the copies; the host launches the step that reads them at once."""
    engine = lagging(tiered(engine_config(target, num_pages=40, proposer="none")))
    expected = [tokens(outputs) for outputs in run(engine, ASKED[:1], GREEDY)]
    run(engine, ASKED[1:3], GREEDY)
    engine = engine_with_memory(engine)
    begin(engine, "back", ASKED[0])
    engine.step()
    assert [request.num_cached_tokens for request in engine.sequences.running] == [60]
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert [tokens(outputs)] == expected
    engine.check_integrity()


@pytest.mark.parametrize(
    ("fails", "is_alone"),
    [("save", True), ("load", True), ("before_steps", True), ("has_loaded", False)],
)
def test_a_tier_that_fails_is_left_with_one_warning(
    fails: str, is_alone: bool, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(target, proposer="none", num_pages=24)
    asked, greedy = ASKED[:2], replace(GREEDY, max_tokens=4)
    expected = [tokens(run(Engine(config), [prompt], greedy)[0]) for prompt in asked]
    engine = with_copies(lagging(tiered(config)), lambda copies: FailingCopies(copies, fails))
    others = [] if is_alone else [[1, 2, 3]]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for prompt, answer in zip(asked, expected, strict=True):
                assert tokens(run(engine, [*others, prompt], greedy)[-1]) == answer
    warnings = [r.message for r in caplog.records if "host memory" in r.message]
    assert len(warnings) == 1
    assert "the bus is gone" in warnings[0]
    stats = engine.stats()
    assert (stats.host_pages_total, stats.host_pages_used) == (0, 0)
    assert stats.host_loaded_tokens == 0


@pytest.mark.parametrize(
    ("host_gib", "caches", "says"),
    [
        (1e6, True, "has room for"),
        (1e-9, True, "holds no page: set it to"),
        (0.001, False, "no prefixes are cached"),
    ],
)
def test_host_memory_that_cannot_serve_is_refused_at_start(
    host_gib: float, caches: bool, says: str, target: Path
) -> None:
    with pytest.raises(ConfigError, match=f"cache.host_gib is .*{says}.* 0"):
        Engine(tiered(engine_config(target, prefix_caching=caches), host_gib))


@pytest.mark.parametrize("windows", [False, True])
def test_the_least_that_is_named_holds_a_page(windows: bool, tiny_model: Tiny) -> None:
    config = engine_config(tiny_model("mistral" if windows else "llama"), num_pages=24)
    with pytest.raises(ConfigError, match=r"holds no page: set it to \S+ at least") as refused:
        Engine(tiered(config, 1e-9))
    engine = Engine(tiered(config, float(str(refused.value).split()[10])))
    assert engine.info.host_pages == 1
    texts = prompts([60, 61], VOCAB)
    expected = [tokens(run(Engine(config), [text], GREEDY)[0]) for text in texts]
    for _ in range(2):
        assert [tokens(run(engine, [text], GREEDY)[0]) for text in texts] == expected


def test_more_than_there_is_of_a_gpus_host_is_refused_before_weights_are_read(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they take none of it."""
    monkeypatch.setattr(pair, "load_network", None)
    config = replace(tiered(engine_config(target), 1e6), device="cuda")
    with pytest.raises(ConfigError, match=r"host_gib is 1e\+06, but the machine has room for"):
        Engine(config)


def test_host_memory_that_cannot_be_had_ends_the_start_with_what_to_lower(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is enough of it, and the driver or the kernel still refuses."""
    refuse = Mock(side_effect=RuntimeError("error 2 of CUDA"))
    monkeypatch.setattr(start_up, "host_pages_of", lambda device: refuse)
    says = r"of host memory cannot be pinned \(error 2 of CUDA\): lower cache\.host_gib"
    with pytest.raises(ConfigError, match=says):
        Engine(tiered(engine_config(target)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the cache is not in host memory")
def test_the_largest_that_is_named_fits(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * 2**30)
    config = engine_config(target, num_pages=512)
    with pytest.raises(ConfigError, match=r"room for 2\.6 GiB"):
        Engine(tiered(config, 2.7))
    info = Engine(tiered(config, 2.6)).info
    assert 2.59 * 2**30 < info.host_bytes <= 2.6 * 2**30
    assert info.host_bytes == info.cache_bytes // (info.num_pages + 1) * info.host_pages


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the cache is not in host memory")
def test_recent_answers_are_held_to_the_same_room(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * 2**30)

    def with_answers(num_mib: int, host_gib: float = 0, *sources: SourceName) -> EngineConfig:
        config = tiered(engine_config(target, proposer=sources or ["suffix"]), host_gib)
        speculation = replace(config.speculation, suffix_answers_mib=num_mib)
        return replace(config, speculation=speculation)

    says = "suffix_answers_mib is {}, but the machine has room for {} MiB: set it to that at most"
    with pytest.raises(ConfigError, match=says.format(60000, r"27\d\d")):
        Engine(with_answers(60000))
    with pytest.raises(ConfigError, match=says.format(800, r"7\d\d")):
        Engine(with_answers(800, 2.0))
    Engine(with_answers(700, 2.0))
    Engine(with_answers(60000, 0, "prediction"))  # it keeps none
    # When pages are counted, the memory has been taken.
    monkeypatch.setattr(seats, "available_bytes", lambda: 3 * 2**30)
    assert seats.left_for_caches(with_answers(700)) == seats.left_for_caches(with_answers(0))

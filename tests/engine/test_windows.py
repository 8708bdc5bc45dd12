"""Layers with a window give pages back behind it, and nobody's answer changes."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from block_heads import save_tiny_block_head
from engines import GREEDY, engine_config, is_greedy, lagging, prompts, run, tokens
from heads import save_tiny_head
from tiny_models import VOCAB, Tiny

from outrider.engine.api import NewRequest, RequestOutput, SamplingParams
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.memory.device_memory import DeviceMemory
from outrider.engine.memory.pages import DUMMY_PAGE
from outrider.engine.memory.sequence import SequenceMemory
from outrider.engine.models import pair
from outrider.engine.models.groups import LayerGroup
from outrider.engine.models.network import PagedLayers

WINDOW, PAGE = 8, 4
MIXED = {
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 3,
}
# All layers of the tiny Mistral and Gemma 3 have a window, one of two of gpt-oss.
TARGETS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt-oss": ("gpt_oss", {}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7}),  # the sixth layer sees everything
    "mistral": ("mistral", {}),
    "mixed": ("qwen3", MIXED),
}
ASKED = prompts([50, 7, 33, 18], VOCAB)
PARAMS = [
    GREEDY,
    replace(GREEDY, max_tokens=40, logprobs=2),
    SamplingParams(max_tokens=30, seed=3, verification="match", prompt_logprobs=1),
    SamplingParams(max_tokens=30, seed=4, temperature=0.7, verification="match", logprobs=1),
]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tiny_model: Tiny) -> Path:
    architecture, options = TARGETS[request.param]
    return tiny_model(architecture, **options)


@pytest.fixture
def mixed(tiny_model: Tiny) -> Path:
    return tiny_model("qwen3", **MIXED)


def save_draft(kind: str, target: Path, folder: Path, tiny_model: Tiny) -> Path | None:
    if kind == "eagle3":
        return save_tiny_head(folder, target, boundaries=(0, 1, 2))
    if kind == "dflash":  # with a window of its own
        return save_tiny_block_head(
            folder, target, boundaries=(0, 1, 2), windows=(None, 7), num_layers=2
        )
    return tiny_model("mistral", num_hidden_layers=1) if kind == "draft_model" else None


def keep_all(patch: pytest.MonkeyPatch) -> None:
    """From now on, engines keep all pages of all layers, in one group."""

    def together(owners: Iterable[PagedLayers], max_model_len: int) -> list[LayerGroup]:
        return [
            LayerGroup(None, [(owner, layer) for owner in owners for layer in owner.attentions])
        ]

    patch.setattr(pair, "grouped", together)


def spoil_what_is_given_back(engine: Engine, patch: pytest.MonkeyPatch) -> list[int]:
    """From now on, pages are NaN once they are behind a window; returns their groups."""
    spoilt: list[int] = []
    set_page = SequenceMemory.set_page

    def spoiling(memory: SequenceMemory, group: int, column: int, page: int) -> None:
        held = memory.pages[group]
        if page == DUMMY_PAGE and column < len(held):
            spoilt.append(group)
            for _, layer in engine.worker.pair.groups[group].layers:
                for pages in layer.bound_pages:
                    pages[held[column]] = torch.nan
        set_page(memory, group, column, page)

    patch.setattr(SequenceMemory, "set_page", spoiling)
    return spoilt


def whole(outputs: list[RequestOutput]) -> list[object]:
    entries = [e for o in outputs for e in (*(o.prompt_logprobs or ()), *(o.logprobs or ()))]
    return [tokens(outputs), entries]


def served(config: EngineConfig, lag: int, times: int = 1) -> list[list[list[object]]]:
    engine = lagging(config) if lag else Engine(config)
    return [[whole(o) for o in run(engine, ASKED, PARAMS)] for _ in range(times)]


@pytest.mark.parametrize(
    ("kind", "lag"),
    [
        ("none", 0),
        *((kind, 1) for kind in ("none", "draft_model", "eagle3", "dflash")),
        *(
            pytest.param(kind, 0, marks=pytest.mark.deep)
            for kind in ("draft_model", "eagle3", "dflash")
        ),
    ],
)
def test_nothing_that_is_given_back_is_read(
    kind: str, lag: int, mixed: Path, tmp_path: Path, tiny_model: Tiny
) -> None:
    """Chunks, verifications and drafts behind tokens that the host does not know yet."""
    draft = save_draft(kind, mixed, tmp_path / "draft", tiny_model)
    config = engine_config(mixed, draft, k=3, prefix_caching=False, max_num_batched_tokens=16)
    with pytest.MonkeyPatch.context() as patch:
        keep_all(patch)
        expected = served(config, lag)
    engine = lagging(config) if lag else Engine(config)
    with pytest.MonkeyPatch.context() as patch:
        spoilt = spoil_what_is_given_back(engine, patch)
        got = [[whole(o) for o in run(engine, ASKED, PARAMS)]]
    assert got == expected
    assert set(spoilt) == ({1, 2} if kind == "dflash" else {1})
    if kind != "none":
        assert sum(engine.stats().accepted_per_position) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="not captured in float32")
@pytest.mark.parametrize("is_short_of_pages", [False, True], ids=["hits", "preempted"])
def test_answers_are_the_targets_own(target: Path, is_short_of_pages: bool) -> None:
    num_pages = 24 if is_short_of_pages else 200
    engine = lagging(engine_config(target, num_pages=num_pages, max_num_batched_tokens=16))
    assert len(engine.worker.pair.groups) == 2
    begins_alike = [*ASKED[0][:41], 5, 6]
    for asked in (ASKED, [begins_alike, *ASKED]):
        for prompt, outputs in zip(asked, run(engine, asked, GREEDY), strict=True):
            assert is_greedy(target, prompt, tokens(outputs))
    stats = engine.stats()
    assert stats.preemptions > 0 if is_short_of_pages else stats.cached_tokens > 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="no equal bits in float32 there")
@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "dflash"])
def test_hits_change_no_answer(kind: str, mixed: Path, tmp_path: Path, tiny_model: Tiny) -> None:
    draft = save_draft(kind, mixed, tmp_path / "draft", tiny_model)
    config = engine_config(mixed, draft, k=3, max_num_batched_tokens=16)
    config = replace(config, batch_invariant=True)
    first, again = served(config, lag=1, times=2)
    assert [each[0] for each in again] == [each[0] for each in first]


def test_a_sequence_holds_only_its_window(mixed: Path) -> None:
    engine = lagging(engine_config(mixed, max_num_batched_tokens=16))
    params = replace(GREEDY, max_tokens=100)
    held: list[int] = []
    launch = DeviceMemory.launch

    def counting(memory: DeviceMemory, one: SequenceMemory, *ends: int) -> None:
        launch(memory, one, *ends)
        held.append(sum(page != DUMMY_PAGE for page in one.pages[1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMemory, "launch", counting)
        (outputs,) = run(engine, ASKED[:1], params)
    assert len(tokens(outputs)) == 100
    assert max(held) <= -(-WINDOW // PAGE) + 1


@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_layers_with_a_window_never_have_too_few_pages(
    kind: str, mixed: Path, tmp_path: Path, tiny_model: Tiny
) -> None:
    """Every seat is taken, prompts come in chunks of every size, and nothing is cached."""
    draft = save_draft(kind, mixed, tmp_path / "draft", tiny_model)
    rows = {"max_num_seqs": 5, "max_num_batched_tokens": 37}
    config = engine_config(mixed, draft, num_pages=400, prefix_caching=False, **rows)
    engine = lagging(config)
    num_pages = engine.worker.budget.of_groups(400)[1]
    group = engine.sequences.memory._groups[1]
    least = num_pages
    engine.submit(
        [
            NewRequest(request_id=str(i), prompt_token_ids=prompt, params=GREEDY)
            for i, prompt in enumerate(prompts([50, 3, 9, 77, 20, 31, 5, 64, 40, 12], VOCAB))
        ]
    )
    while engine.has_work():
        engine.step()
        least = min(least, group.num_free)
    assert engine.stats().preemptions == 0
    assert least < num_pages - 1


def test_memory_that_windows_save_is_counted(mixed: Path, tiny_model: Callable[..., Path]) -> None:
    """A third of the layers needs hardly any pages."""
    config = engine_config(mixed, num_pages=400, max_num_seqs=2, max_num_batched_tokens=16)
    engine = Engine(config)
    layers = [layer for group in engine.worker.pair.groups for _, layer in group.layers]
    allocated = sum(pages.nbytes for layer in layers for pages in layer.bound_pages)
    info = engine.info
    assert info.cache_bytes == allocated
    with pytest.MonkeyPatch.context() as patch:
        keep_all(patch)
        without = Engine(config).info
    assert without.saved_by_windows_bytes == 0
    assert info.cache_bytes + info.saved_by_windows_bytes == without.cache_bytes
    assert 0.2 < info.saved_by_windows_bytes / without.cache_bytes < 1 / 3
    assert Engine(engine_config(tiny_model())).info.saved_by_windows_bytes == 0

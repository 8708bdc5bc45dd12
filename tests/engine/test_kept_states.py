"""Prefixes of hybrids are shared where a state is kept, and only there. Bits stay the same."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, lagging, prompts, run, tokens
from host_copies import with_late_copies
from mtp import save_tiny_hybrid
from tiny_models import DEVICE, VOCAB, Tiny
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.config import ConfigError, EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.memory.device_memory import DeviceMemory
from outrider.engine.memory.sequence import SequenceMemory
from outrider.engine.memory.spec import PagedSpec
from outrider.engine.memory.states import KeptStates
from outrider.engine.models.loading import load_network

PAGE = 4
[TEXT] = prompts([60], VOCAB)
OTHER = [(token + 1) % VOCAB for token in TEXT]
SCORED = replace(GREEDY, logprobs=1, max_tokens=6)


# ---- which prefixes are found


class Memory:
    """Sequences whose prompts are computed at once, chunk by chunk."""

    def __init__(self, num_places: int = 8, interval: int = 16) -> None:
        self.states = KeptStates(range(100, 100 + num_places), PAGE, interval)
        self.memory = DeviceMemory([PagedSpec(1)], [64], PAGE, states=self.states)
        self.at: list[int] = []  # where chunks ended

    def compute(self, token_ids: list[int], slot: int = 0) -> int:
        """Of how many tokens nothing had to be computed."""
        one = SequenceMemory(token_ids)
        found = self.memory.attach_prefix(one, len(token_ids) - 1, slot)
        assert self.memory.allocate(one, len(token_ids))
        self.at = []
        while (left := len(token_ids) - one.num_computed_tokens) > 0:
            rows = one.rows_up_to_an_edge(left)
            self.at.append(one.num_computed_tokens + rows)
            self.memory.launch(one, self.at[-1] - len(token_ids), None)
        self.memory.release(one)
        self.memory.check_integrity([])
        return found


def test_chunks_end_where_states_are_kept() -> None:
    memory = Memory()
    assert memory.compute(TEXT[:50]) == 0
    assert memory.at == [16, 32, 48, 50]
    assert memory.states.take_copies() == [(0, 107), (0, 106), (0, 105)]
    # From the last edge on, too little is left to keep another.
    assert memory.compute(TEXT[:50], slot=3) == 48
    assert memory.at == [50]
    assert memory.states.take_copies() == [(105, 3)]


def test_a_prefix_is_shared_up_to_a_state_and_no_further() -> None:
    memory = Memory()
    memory.compute(TEXT[:50])
    assert memory.compute([*TEXT[:30], *OTHER[30:50]]) == 16
    # It kept one where it began to differ: the pages in front of that were there already.
    assert memory.at == [28, 32, 48, 50]
    assert memory.compute([*TEXT[:28], *OTHER[20:40]]) == 28


def test_a_short_prompt_keeps_nothing() -> None:
    memory = Memory(interval=64)
    memory.compute(TEXT[:8])
    assert memory.at == [8]
    assert memory.compute(TEXT[:8]) == 0


def test_states_that_nobody_asked_for_go_first() -> None:
    memory = Memory(num_places=2)
    memory.compute(TEXT[:50])
    assert memory.compute(TEXT[:50]) == 48
    memory.compute(OTHER[:50])
    assert memory.compute(TEXT[:50]) == 48
    assert memory.compute(OTHER[:50]) == 48
    # Then the one that was used longest ago.
    memory.compute(OTHER[1:51])
    assert memory.compute(TEXT[:50]) == 0


def test_a_state_goes_with_the_page_in_front_of_it() -> None:
    memory = Memory()
    memory.compute(TEXT[:50])
    one = SequenceMemory(OTHER * 4)
    memory.memory.attach_prefix(one, 0, 1)
    assert memory.memory.allocate(one, 63 * PAGE)
    memory.memory.release(one)
    hashes = SequenceMemory(TEXT[:50]).hash_pages(12, PAGE, 0)
    assert memory.states.last_edge(hashes, 12, ()) == 0
    assert memory.compute(TEXT[:50]) == 0


def test_a_sequence_that_may_be_spoilt_leaves_no_state() -> None:
    memory = Memory()
    memory.compute(TEXT[:50])
    one = SequenceMemory(TEXT[:50])
    memory.memory.attach_prefix(one, 49, 0)
    memory.memory.forget(one)
    memory.memory.release(one)
    memory.states.take_copies()
    assert memory.compute(TEXT[:50]) == 0
    assert len(memory.states.take_copies()) == 3  # sound ones take their place


def test_a_sequence_waits_for_a_state_that_is_coming() -> None:
    memory = Memory().memory
    first, second = (SequenceMemory([*TEXT[:end], 0]) for end in (49, 59))
    memory.attach_prefix(first, 49, 0)
    memory.allocate(first, 50)
    for end, is_coming in ((16, True), (32, True), (48, False)):
        memory.launch(first, end - 50, None)
        assert memory.prefix_is_coming(second, 59, [first]) == is_coming


# ---- the same answers


@pytest.fixture
def target(tiny_model: Tiny) -> Path:
    return tiny_model("qwen3_5_text")


def answers(engine: Engine, asked: list[list[int]]) -> list[Any]:
    outputs = run(engine, asked, SCORED)
    return [
        (tokens(each), [entry.logprob for o in each for entry in o.logprobs or ()])
        for each in outputs
    ]


def plainly(target: Path, asked: list[list[int]]) -> list[Any]:
    """Each by itself, without any cache."""
    config = engine_config(target, proposer="none", prefix_caching=False, max_num_seqs=1)
    return answers(Engine(replace(config, batch_invariant=True)), asked)


ASKED = [TEXT, TEXT[:41], [*TEXT[:33], *OTHER[:9]], TEXT, OTHER[:37], [*TEXT[:33], 5]]


needs_equal_bits = pytest.mark.skipif(
    torch.cuda.is_available(), reason="no equal bits in float32 there"
)


@needs_equal_bits
@pytest.mark.parametrize(
    ("make", "has_head", "architecture"),
    [
        *((make, has, "qwen3_5_text") for make in (Engine, lagging) for has in (False, True)),
        (lagging, False, "nemotron_h"),
    ],
)
def test_answers_from_kept_states_have_the_same_bits(
    make: Callable[..., Engine],
    has_head: bool,
    architecture: str,
    tiny_model: Tiny,
    tmp_path: Path,
) -> None:
    target = save_tiny_hybrid(tmp_path / "model") if has_head else tiny_model(architecture)
    options: dict[str, Any] = {"k": 2} if has_head else {"proposer": "suffix"}
    config = engine_config(
        target, target if has_head else None, state_interval=8, max_num_seqs=2, **options
    )
    engine = make(replace(config, batch_invariant=True))
    expected = plainly(target, ASKED)
    assert answers(engine, ASKED) == expected
    for prompt, answer in zip(ASKED, expected, strict=True):  # one after the other
        assert answers(engine, [prompt]) == [answer]
    assert engine.stats().cached_tokens > 200
    engine.check_integrity()


@needs_equal_bits
def test_a_preempted_sequence_goes_on_from_a_state(target: Path) -> None:
    config = engine_config(
        target, num_pages=30, proposer="suffix", state_interval=8, max_num_batched_tokens=24
    )
    engine = Engine(replace(config, batch_invariant=True))
    asked = prompts([30, 25, 31, 28], VOCAB)
    assert answers(engine, asked) == plainly(target, asked)
    assert engine.stats().preemptions > 0
    engine.check_integrity()


def test_the_states_of_all_layers_take_one_copy(target: Path) -> None:
    class Counted(TorchDispatchMode):
        num_copies = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.num_copies += func is torch.ops.aten.copy_.default
            return func(*args, **(kwargs or {}))

    network = load_network(ModelConfig(path=str(target), dtype="float32"), DEVICE)
    network.bind_states(4, 2)
    fields = [field for state in network.states for field in state.bound]  # type: ignore[attr-defined]
    assert len(fields) > 3
    for slot in (0, 3):
        for field in fields:
            field[slot] = slot + 1
    with Counted() as counted:
        network.copy_states([(0, 2), (3, 0)])
    assert counted.num_copies == 2
    assert [{int(field[slot].unique()) for field in fields} for slot in range(4)] == [
        {4},
        {0},
        {1},
        {4},
    ]


def test_no_state_is_kept_without_a_prefix_cache(target: Path) -> None:
    config = engine_config(target, prefix_caching=False, state_interval=8, max_num_seqs=3)
    engine = Engine(config)
    assert engine.info.num_states == 4
    for _ in range(2):
        answers(engine, [TEXT])
    assert engine.stats().cached_tokens == 0


def with_host_memory(config: EngineConfig, gib: float = 0.004) -> EngineConfig:
    return replace(config, cache=replace(config.cache, host_gib=gib), batch_invariant=True)


@needs_equal_bits
@pytest.mark.parametrize("has_head", [False, True])
def test_states_come_back_with_their_pages(has_head: bool, target: Path, tmp_path: Path) -> None:
    """Between two prompts another takes their pages; copies are late."""
    if has_head:
        target = save_tiny_hybrid(tmp_path / "model")
    options: dict[str, Any] = {"k": 2} if has_head else {"proposer": "suffix"}
    config = engine_config(
        target, target if has_head else None, state_interval=8, max_num_seqs=2, num_pages=24,
        **options,
    )  # fmt: skip
    expected = plainly(target, ASKED)
    engine = with_late_copies(lagging(with_host_memory(config)), random.Random(3))
    assert answers(engine, ASKED) == expected
    for prompt, answer in zip(ASKED, expected, strict=True):
        run(engine, [[(token + 2) % VOCAB for token in TEXT]], GREEDY)
        assert answers(engine, [prompt]) == [answer]
        engine.check_integrity()
    assert engine.stats().host_loaded_tokens > 100
    run(engine, [[(token + 3) % VOCAB for token in TEXT]], GREEDY)
    outputs = run(engine, [TEXT], SCORED)[0]
    assert outputs[-1].num_cached_tokens >= 48


@needs_equal_bits
def test_host_memory_is_divided_among_pages_and_states(target: Path) -> None:
    config = engine_config(target, state_interval=32, num_pages=64)
    engine = Engine(with_host_memory(config))
    assert engine.worker.host_pages is not None
    (num_pages, num_states), pages = engine.worker.host_pages
    assert num_states == 1 + num_pages // 8
    assert 0.9 * 0.004 * 2**30 < pages.num_bytes <= 0.004 * 2**30
    with pytest.raises(ConfigError, match=r"holds no page: set it to .* at least"):
        Engine(with_host_memory(config, 1e-6))

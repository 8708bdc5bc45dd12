"""What a step takes does not grow with `max_model_len`, but with the contexts that there are."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import engine_config, prompts, run, tokens
from tiny_models import VOCAB, Tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine import seats, start_up
from outrider.engine.api import SamplingParams, ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models.attention import ForwardBatch, KVPages, PagedAttention
from outrider.engine.models.pair import ModelPair
from outrider.engine.state.batch import packed_len
from outrider.engine.state.slots import Slots
from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.model.attention_items import BATCH_INVARIANT_UNIT, _count_splits

machine_code = pytest.importorskip("machine_code", exc_type=ImportError)
PARAMS = (
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, seed=1, top_k=9, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=9, seed=2, repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingParams(max_tokens=9, seed=3, bad_words=((3, 4),), logit_bias={5: 1.0}),
    SamplingParams(max_tokens=9, seed=4, logprobs=2, prompt_logprobs=2),
)
# What they read of a table is as much as they give.
LOOKUPS = {"index", "index_select", "gather", "embedding", "select", "take"}


def work(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Numbers that an operator reads or writes, about: those of the largest tensor."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    if func._schema.is_mutable and len(tensors) > 1:
        tensors = tensors[1:]  # what it writes into the first is as much as it gets
    elif func.overloadpacket.__name__ in LOOKUPS:
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    return max((x.numel() for x in tensors), default=0)


@contextmanager
def operators() -> Iterator[Counter[tuple[str, int]]]:
    """Counts torch's operators by name and work, but not views."""
    counts: Counter[tuple[str, int]] = Counter()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if not func.is_view and not name.startswith(("_to_copy", "detach", "lift")):
                counts[name, work(func, args, result)] += 1
            return result

    with Operators():
        yield counts


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.skipif(INTERPRET, reason="a kernel is made of operators there")
def test_no_operator_of_a_step_takes_longer(tiny_model: Tiny) -> None:
    def run_with(max_model_len: int) -> Counter[tuple[str, int]]:
        target = tiny_model("llama", seed=0, max_position_embeddings=1 << 16)
        draft = tiny_model("llama", seed=1, max_position_embeddings=1 << 16)
        sources = ("prediction", "suffix", "draft_model")
        config = engine_config(target, draft, k=3, proposer=sources, num_pages=1 << 14)
        engine = Engine(replace(config, max_model_len=max_model_len))
        engine.scheduler.lag = 1
        with operators() as counts:
            run(engine, prompts([7, 20, 5, 30, 11], VOCAB), PARAMS)
        return counts

    short, long = run_with(64), run_with(60_000)
    assert len(short) > 50
    assert not long - short


def test_slots_have_no_room_for_tokens_that_the_cache_cannot_hold(tiny_model: Tiny) -> None:
    target = tiny_model("llama", seed=0, max_position_embeddings=1 << 16)
    engine = Engine(engine_config(target, num_pages=33, max_num_seqs=2))
    assert engine.info.max_model_len == 32 * 4
    assert engine.worker.slots.token_ids.shape[1] < 256
    (outputs,) = run(engine, prompts([100], VOCAB), replace(PARAMS[0], max_tokens=100))
    assert len(tokens(outputs)) == 28


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory of a CPU")
def test_no_sequence_is_longer_than_slots_if_memory_is_freed_after_they_were_made(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model("llama", seed=0, max_position_embeddings=1 << 16)
    config = engine_config(target, num_pages=None, max_num_seqs=2)
    bytes_per_token = ModelPair(config, ignore_progress).groups[0].spec.bytes_per_token
    monkeypatch.setattr(seats, "left_for_caches", lambda _: 1000 * bytes_per_token)
    monkeypatch.setattr(start_up, "left_for_caches", lambda _: 5000 * bytes_per_token)
    engine = Engine(config)
    assert engine.info.max_model_len == engine.worker.slots.max_model_len == 1000
    set_ = replace(config, max_model_len=2000)
    assert Engine(set_).info.max_model_len == 2000  # what is set is left to the cache


@pytest.mark.skipif(INTERPRET, reason="there the kernels run")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would forget what graphs use")
@pytest.mark.parametrize("gpu", ["H100", "RTX_4090"])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("num_seqs", "num_rows"), [(256, 256), (256, 1024), (2, 8), (4, 4096)])
def test_grids_of_attention_are_no_larger(
    num_seqs: int, num_rows: int, batch_invariant: bool, gpu: str
) -> None:
    """Once there may be as many splits as programs run at once."""

    def grids(max_model_len: int) -> list[tuple[str, Any]]:
        with machine_code.grids_of_launches(getattr(machine_code, gpu)) as found:
            slots = Slots(256, max_model_len, 32, 16, torch.device("cuda"), VOCAB, max_drawn=3)
            layer = PagedAttention(32, 8, 128, 128, 128**-0.5)
            packed = empty(packed_len(num_seqs))
            batch = ForwardBatch.unpack(packed, (num_seqs, num_rows, num_seqs), slots)
            batch.batch_invariant = batch_invariant
            layer.pages = KVPages(*(empty(99, 16, 8, 128, dtype=torch.bfloat16) for _ in "kv"))
            layer(empty(num_rows, 32, 128, dtype=torch.bfloat16), batch)
        return found

    short, long = grids(1 << 18), grids(1 << 20)
    assert len(short) > 2
    assert short == long


@pytest.mark.parametrize(
    ("max_model_len", "num_splits"), [(8192, 16), (16_384, 24), (131_072, 48), (1 << 20, 72)]
)
def test_a_doubled_context_takes_attention_8_more_splits(
    max_model_len: int, num_splits: int
) -> None:
    """As docs/operating.md says."""
    assert _count_splits(max_model_len, BATCH_INVARIANT_UNIT) == num_splits

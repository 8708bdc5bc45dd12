"""An answer is the same to the bit in any company, with any k, chunks, preemption.

On a CPU and on a GPU, of targets that prove at load that they can.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from heads import save_tiny_head
from tiny_models import DEVICE
from verification import HAS_KERNELS

from outrider.engine.api import RequestOutput, SamplingParams
from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.kernels.model.packed_linear import has_products

ON_GPU = DEVICE.type == "cuda"
pytestmark = pytest.mark.skipif(
    not ON_GPU and HAS_KERNELS, reason="a promise of the CPU's own path"
)

VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 1536,  # one row of so many inputs is summed otherwise on some machines
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "scale": 0.06,
}
# The dtype that a target is mostly served in, where that keeps its bits.
DTYPE = "bfloat16" if ON_GPU or has_products(torch.bfloat16) else "float32"
OTHERS = [] if ON_GPU or DTYPE == "float32" else [pytest.param("float32", marks=pytest.mark.deep)]
PROMPTS = prompts((3, 15, 90, 47), VOCAB)
Pair = tuple[Path, Path]
Answer = tuple[list[int], list[Any]]


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., Path]) -> Pair:
    """Some drafts are accepted and some are not: it is the target, enlarged."""
    return tiny_model("llama", **SHAPE), tiny_model("llama", **SHAPE | {"scale": 0.066})


def engine(
    pair: Pair, dtype: str, k: int, *, enforce_eager: bool = False, **settings: int
) -> Engine:
    return Engine(config_of(pair, dtype, k, enforce_eager=enforce_eager, **settings))


def config_of(
    pair: Pair, dtype: str, k: int, *, enforce_eager: bool = False, **settings: int
) -> EngineConfig:
    target, draft = pair
    sizes = {"page_size": 16, "num_pages": 128, "max_num_batched_tokens": 512, **settings}
    sizes = {"max_num_seqs": 8, **sizes} if ON_GPU else sizes  # of fewer graphs
    return replace(
        engine_config(target, draft, k=k, **sizes),
        target=ModelConfig(path=str(target), dtype=dtype),
        draft=ModelConfig(path=str(draft), dtype="bfloat16" if ON_GPU else "auto"),
        batch_invariant=True,
        enforce_eager=enforce_eager,
    )


def answer(outputs: list[RequestOutput]) -> Answer:
    return tokens(outputs), [entry for output in outputs for entry in output.logprobs or ()]


@pytest.mark.parametrize("dtype", [DTYPE, *OTHERS])
def test_answers_are_equal_to_the_bit(dtype: str, pair: Pair) -> None:
    drawn = SamplingParams(max_tokens=24, seed=7, verification="match", logprobs=2, ignore_eos=True)
    greedy = replace(drawn, temperature=0.0)
    params = [greedy, drawn, drawn, greedy]

    def one_by_one(engine: Engine) -> list[Answer]:
        each = zip(PROMPTS, params, strict=True)
        return [answer(run(engine, [prompt], of_it)[0]) for prompt, of_it in each]

    truth = one_by_one(engine(pair, dtype, 0, enforce_eager=True))
    assert len({token for ids, _ in truth for token in ids}) > 50  # no loop of a few
    accepted = drafted = 0
    for k in (1, 6):  # and 3 below
        drafting = engine(pair, dtype, k)
        assert one_by_one(drafting) == truth, k
        stats = drafting.stats()
        accepted += sum(stats.accepted_per_position)
        drafted += sum(stats.drafted_per_position)
    assert 0 < accepted < drafted
    few_pages = {"num_pages": 11}
    for k, settings in (
        (0, {"max_num_batched_tokens": 16}),
        (3, {}),
        (3, {"max_num_batched_tokens": 75, "page_size": 5, "num_pages": 200}),
        (3, few_pages),
    ):
        crowded = engine(pair, dtype, k, **settings)
        for _ in range(2):  # the second time prefixes are found
            assert list(map(answer, run(crowded, PROMPTS, params))) == truth, (k, settings)
        assert (crowded.stats().preemptions > 0) == (settings == few_pages)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_large_batch_changes_no_bit(pair: Pair) -> None:
    """64 sequences among sampled neighbours and long prompts, in graphs, with k from 0 to 8."""
    lengths = [1 + 7 * i % 150 for i in range(62)] + [300, 400]
    asked = prompts(lengths, VOCAB)
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, ignore_eos=True)
    alone = engine(pair, "bfloat16", 0, max_num_batched_tokens=100)
    lone = [*range(0, 62, 9), 62, 63]
    truth = [answer(run(alone, [asked[i]], params)[0]) for i in lone]
    room = {"max_num_seqs": 64, "num_pages": 2100, "max_num_batched_tokens": 1000}
    crowded = engine(pair, "bfloat16", 8, **room)
    for seed in (0, 1):
        mixed = [
            replace(params, num_speculative_tokens=(i + seed) % 9)
            if i in lone
            else replace(params, temperature=1.0, seed=i, top_k=i % 3 * 9, logprobs=None)
            for i in range(64)
        ]
        got = run(crowded, asked, mixed)
        assert [answer(got[i]) for i in lone] == truth
    for k in range(9):
        got = run(crowded, asked, replace(params, num_speculative_tokens=k))
        assert [answer(got[i]) for i in lone] == truth, k


@pytest.mark.parametrize("proposer", ["head", "suffix"])
def test_drafts_of_any_source_change_no_bit(proposer: str, pair: Pair, tmp_path: Path) -> None:
    target = pair[0]
    path = save_tiny_head(tmp_path / "head", target, boundaries=(1, 2), scale=0.06)
    asked = [prompt + prompt[:5] for prompt in PROMPTS]  # something to look up
    plain = engine(pair, DTYPE, 0)
    config = replace(config_of(pair, DTYPE, 4), draft=ModelConfig(path=str(path)))
    if proposer == "suffix":
        speculation = replace(config.speculation, sources=("suffix",))
        config = replace(config, draft=None, speculation=speculation)
    drafting = Engine(config)
    assert drafting.info.proposer == ("eagle3" if proposer == "head" else "suffix")
    for params in (GREEDY, replace(GREEDY, temperature=0.5, seed=3, verification="match")):
        params = replace(params, logprobs=2, ignore_eos=True)
        truth = [answer(run(plain, [prompt], params)[0]) for prompt in asked]
        assert [answer(run(drafting, [prompt], params)[0]) for prompt in asked] == truth
        assert list(map(answer, run(drafting, asked, params))) == truth
    assert sum(drafting.stats().drafted_per_position) > 20


def test_what_a_draft_left_behind_harms_nobody(pair: Pair) -> None:
    """NaN behind a sequence, of a rejected draft or of whoever had the page, is not attended to."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    sound, poisoned = (engine(pair, DTYPE, 0) for _ in range(2))
    for attention in poisoned.worker.pair.target.attentions:
        for pages in attention.bound_pages:
            pages.fill_(float("nan"))
    got, truth = (run(each, PROMPTS, params) for each in (poisoned, sound))
    assert list(map(tokens, got)) == list(map(tokens, truth))

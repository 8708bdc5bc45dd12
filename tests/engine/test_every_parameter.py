"""Every parameter, alone and in pairs, under every rule and proposer, beside all the others.

One batch holds sequences of all the parameter sets under test, so that each is sampled in the
company of the others; each set's outputs are held to exact enumeration of its processed target.
"""

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from block_heads import save_tiny_block_head
from distributions import bound, of_limit, pearson, total_variation
from engines import engine_config, run, tokens, without_pauses
from grammars import stands_for
from heads import save_tiny_head
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from mtp import save_tiny_mtp_model
from target_distribution import DEAD_END, joint
from tiny_models import Quick

from outrider.engine.api import (
    InvalidRequestError,
    NewRequest,
    ProcessorChoice,
    SamplingParams,
    ThinkingBudget,
    Verification,
)
from outrider.engine.engine import Engine
from outrider.engine.validation import check_request

VOCAB, EOS = 4, 3
PROMPT = [2, 0, 3]
K = 3
SEATS = 240
BASE = SamplingParams(max_tokens=4)
RULES: tuple[Verification, ...] = ("token", "block", "match")
PROPOSERS = ["draft_model", "suffix", "head", "dspark", "mtp"]
ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 2.5},
    "logit_bias": {"logit_bias": {1: 1.5, 2: -2.0}},
    "allowed_token_ids": {"allowed_token_ids": (0, 1, 3)},
    "bad_words": {"bad_words": ((1, 0), (2,), (3, 3, 1))},
    "stop_token_ids": {"stop_token_ids": (1,)},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (1,)},
    "ignore_eos": {"ignore_eos": True},
    "logits_processors": {"logits_processors": (ProcessorChoice("parity", {"bias": 1.5}),)},
    # The prompt is 2, 0, 3: its thought has two tokens.
    "thinking": {
        "thinking": ThinkingBudget(num_tokens=3, open_token_id=2, close_token_id=1, begun=True)
    },
    "grammar": {"grammar": "start: /(ab|ac|b)*/"},
    "logprobs": {"logprobs": 2},
    "logprob_token_ids": {"logprobs": 0, "logprob_token_ids": (3, 0)},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "num_speculative_tokens": {"num_speculative_tokens": 1},
}
PAIRS = list(itertools.combinations(ALONE, 2))


TRUTHS: dict[tuple[Path, str], dict[tuple[int, ...], float]] = {}  # for all proposers


def truth_of(params: SamplingParams, target: Path) -> dict[tuple[int, ...], float]:
    def mask(output: list[int]) -> list[bool]:
        """What may follow in (ab|ac|b)*, where the tokens are a, b, c and eos."""
        if params.grammar is None:
            return [True] * VOCAB
        ends = [token in (*params.stop_token_ids, EOS) for token in range(VOCAB)]
        if EOS in output:  # it was ignored, but nothing goes on behind it
            return ends
        if output[-1:] == [0]:
            return [False, True, True, False]
        return [True, True, ends[2], True]

    key = target, repr(params)
    if key not in TRUTHS:
        TRUTHS[key] = joint(target, PROMPT, params, (EOS,), mask)
    return TRUTHS[key]


@pytest.fixture(scope="module")
def targets(quick_model: Quick, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By proposer; one of them is an MTP head, which only its own target has."""
    path = tmp_path_factory.mktemp("target")
    with_head = save_tiny_mtp_model(path, seed=3, vocab_size=VOCAB, scale=0.15)
    return dict.fromkeys(PROPOSERS, quick_model(3, 2)) | {"mtp": with_head}


@pytest.fixture(scope="module")
def engines(
    quick_model: Quick, targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Engine]:
    draft, target = quick_model(4), targets["head"]
    head = save_tiny_head(
        tmp_path_factory.mktemp("head"), target, boundaries=(0, 1, 2), draft_vocab=3, scale=0.2
    )
    dspark = save_tiny_block_head(
        tmp_path_factory.mktemp("dspark"),
        target,
        boundaries=(0, 1, 2),
        markov="vanilla",
        draft_vocab=3,
        scale=0.2,
    )
    drafts = {"draft_model": draft, "head": head, "dspark": dspark, "mtp": targets["mtp"]}

    def make(proposer: str) -> Engine:
        config = engine_config(
            targets[proposer],
            drafts.get(proposer),
            proposer="draft_model" if proposer in drafts else proposer,
            k=K,
            max_num_seqs=SEATS,
            max_num_batched_tokens=2048,
            num_pages=1024,
        )
        return Engine(
            replace(
                config,
                token_table=stands_for("a", "b", "c"),
                eos_token_ids=(EOS,),
                logits_processors=("parity = logits_processors:FavourParity",),
            )
        )

    return {proposer: make(proposer) for proposer in PROPOSERS}


def sample(
    engine: Engine, sets: Sequence[SamplingParams], num_samples: int
) -> list[Counter[tuple[int, ...]]]:
    """Outputs of each parameter set; every sample has a seed and a k of its own."""
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in sets]
    without_pauses(engine)
    everything = [(i, seed) for seed in range(num_samples) for i in range(len(sets))]
    for first in range(0, len(everything), SEATS):
        batch = everything[first : first + SEATS]
        each = [
            replace(
                sets[i],
                seed=seed * len(sets) + i,
                num_speculative_tokens=sets[i].num_speculative_tokens or seed % (K + 1),
            )
            for i, seed in batch
        ]
        for (i, _), outputs in zip(batch, run(engine, [PROMPT] * len(batch), each), strict=True):
            assert outputs[-1].error is None
            counts[i][tuple(tokens(outputs))] += 1
    return counts


def assert_sampled_from(
    target: Path, sets: Sequence[SamplingParams], counts: list[Counter[tuple[int, ...]]]
) -> None:
    """Each set's samples come from its joint, and so do all of them taken together."""
    statistic, degrees = 0.0, 0
    for params, seen in zip(sets, counts, strict=True):
        truth = truth_of(params, target)
        assert sum(truth.values()) == pytest.approx(1)
        assert seen.keys() <= truth.keys(), params
        assert total_variation(truth, seen) < bound(len(truth), seen.total()), params
        each = pearson(truth, seen)
        assert of_limit(*each) < 1, params
        statistic, degrees = statistic + each[0], degrees + each[1]
    assert of_limit(statistic, degrees) < 1


def can_always_go_on(params: SamplingParams, target: Path) -> bool:
    return all(output[-1] != DEAD_END for output in truth_of(params, target))


def merged(names: Sequence[str], verification: Verification) -> SamplingParams:
    changes: dict[str, Any] = {"verification": verification}
    for name in names:
        changes |= ALONE[name]
    return replace(BASE, **changes)


def test_every_field_is_here() -> None:
    named = {name for change in ALONE.values() for name in change}
    others = {"max_tokens", "seed", "verification"}
    assert named | others == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    "proposer",
    # The first two draft as all do, and without a distribution.
    [*PROPOSERS[:2], *(pytest.param(each, marks=pytest.mark.deep) for each in PROPOSERS[2:])],
)
def test_each_parameter_alone_and_beside_the_others_keeps_the_joint(
    engines: dict[str, Engine], targets: dict[str, Path], proposer: str
) -> None:
    # Each alone under one rule, every second with a head; of the pairs every 24th, another for each
    # proposer, so that all names and rules are met.
    first, target = PROPOSERS.index(proposer), targets[proposer]
    is_quick = proposer in ("draft_model", "suffix")
    alone = [(name,) for name in ALONE][0 if is_quick else first % 2 :: 1 if is_quick else 2]
    names = alone + PAIRS[first * 5 :: 24]
    sets = [merged(each, RULES[i % 3]) for i, each in enumerate(names)]
    sets = [params for params in sets if can_always_go_on(params, target)]
    assert len(sets) > len(names) * 0.8
    assert_sampled_from(target, sets, sample(engines[proposer], sets, num_samples=180))
    assert sum(engines[proposer].stats().accepted_per_position) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_each_pair_keeps_the_joint(
    engines: dict[str, Engine], targets: dict[str, Path], proposer: str, rule: Verification
) -> None:
    target = targets[proposer]
    sets = [merged(pair, rule) for pair in PAIRS]
    sets = [params for params in sets if can_always_go_on(params, target)]
    assert_sampled_from(target, sets, sample(engines[proposer], sets, num_samples=300))


@st.composite
def parameter_sets(draw: st.DrawFn) -> SamplingParams:
    """Any mixture of parameters within their ranges."""

    def number(low: float, high: float) -> st.SearchStrategy[float]:
        return st.floats(low, high, width=32)

    ids = st.integers(0, VOCAB - 1)
    choices: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.just(0.0) | number(0.25, 4),
        "top_k": st.integers(1, VOCAB),
        "top_p": number(0.125, 1),
        "min_p": number(0, 0.5),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0.25, 4),
        "logit_bias": st.dictionaries(ids, number(-3, 3)),
        "allowed_token_ids": st.lists(ids, min_size=2, unique=True).map(tuple),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(
            tuple
        ),
        "min_tokens": st.integers(0, BASE.max_tokens),
        "stop_token_ids": st.lists(ids, max_size=2).map(tuple),
        "ignore_eos": st.booleans(),
        "logits_processors": st.just(ALONE["logits_processors"]["logits_processors"]),
        "thinking": st.builds(
            ThinkingBudget,
            num_tokens=st.integers(0, 4),
            open_token_id=ids.filter(lambda token: token in PROMPT),
            close_token_id=ids,
            num_opening=st.integers(0, 2),
            begun=st.booleans(),
        ),
        "grammar": st.just(ALONE["grammar"]["grammar"]),
        "logprobs": st.integers(0, VOCAB),
        "prompt_logprobs": st.integers(0, VOCAB),
        "max_tokens": st.integers(1, BASE.max_tokens),
    }
    names = draw(st.lists(st.sampled_from(sorted(choices)), unique=True, max_size=6))
    params = replace(BASE, **{name: draw(choices[name]) for name in names})
    return replace(params, verification=draw(st.sampled_from(RULES)))


NUM_EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "0"))


@settings(
    max_examples=NUM_EXAMPLES or 20,
    derandomize=not NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(params=parameter_sets(), proposer=st.sampled_from(PROPOSERS), seed=st.integers(0, 2**32))
def test_any_mixture_of_parameters_is_exact(
    engines: dict[str, Engine],
    targets: dict[str, Path],
    params: SamplingParams,
    proposer: str,
    seed: int,
) -> None:
    target = targets[proposer]
    new = NewRequest(request_id="new", prompt_token_ids=PROMPT, params=params)
    try:
        check_request(new, 256, VOCAB, (EOS,))
    except InvalidRequestError:
        assume(False)
    assume(can_always_go_on(params, target))
    match = replace(params, verification="match")
    sets = [
        *(replace(params, seed=seed + i, num_speculative_tokens=i % (K + 1)) for i in range(200)),
        *(replace(match, seed=seed + i, num_speculative_tokens=0) for i in range(20)),
        *(replace(match, seed=seed + i, num_speculative_tokens=1 + i % K) for i in range(20)),
    ]
    outputs = [tuple(tokens(o)) for o in run(engines[proposer], [PROMPT] * len(sets), sets)]
    assert_sampled_from(target, [params], [Counter(outputs[:200])])
    # With its own noise for each position, what is drawn does not depend on the drafts at all.
    assert outputs[200:220] == outputs[220:]

"""Heads: their formulas, and what they leave behind of every kind of step."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import save_tiny_block_head
from engines import GREEDY, engine_config, generate, prompts, run, tokens
from head_truth import SAMPLED, Truth, check_drafts, source_of
from heads import save_tiny_head, tensors_of
from mtp import save_tiny_mtp_model
from safetensors.torch import save_file
from tiny_models import VOCAB, Tiny, save_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.models import attention
from outrider.engine.models.attention import KeptRows
from outrider.engine.models.blocks import Block
from outrider.engine.models.heads.eagle3 import Eagle3Head

K = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "speculators": {"speculators": True, "norm_before_residual": True, "draft_vocab": 50},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "one-norm": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "qwen3": {"head_norms": True, "own_embedding": True},
    "layers": {"num_layers": 3, "draft_vocab": 30},
    "narrow": {"hidden_size": 24, "boundaries": (0, 3, 5)},
    "last-layer": {"boundaries": (6,), "pickled": True},
    "parallel": {"parallel": True, "num_layers": 2, "fc_norm": True},
    "parallel-speculators": {"parallel": True, "speculators": True, "draft_vocab": 50},
}
BLOCK_VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash-speculators": {"speculators": True, "draft_vocab": 50},
    "dflash-from-anchor": {"from_anchor": True, "nested": False, "own_embedding": True},
    "dflash-windows": {"windows": (None, 7), "num_layers": 2},
    "dflash-open-windows": {"windows": (7, 7), "is_causal": False, "head_norms": False},
    "dspark": {"markov": "vanilla", "nested": False, "own_output": True, "own_embedding": True},
    "dspark-speculators": {"markov": "vanilla", "speculators": True, "draft_vocab": 50},
    "dspark-confident": {"markov": "vanilla", "confidence": "token", "boundaries": (0, 3)},
    "dflash2": {"selector": (6, 48), "windows": (7, 7), "is_causal": False, "block_size": 4},
    "dflash2-scaled": {
        "selector": (5, 60),
        "convolution": (3, 4),
        "nested": False,
        "windows": (None, 7),
        "keys": {
            "input_embedding_scale": 1.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 4.0,
        },
    },
    "dspark-leading": {"markov": "vanilla", "confidence": "states", "from_anchor": False},
}
OF_HYBRIDS: dict[str, dict[str, Any]] = {
    "dspark-hybrid": {"boundaries": (1, 2), "markov": "vanilla", "windows": (7, 7)},
    "dflash2-hybrid": {"boundaries": (0, 1, 3), "selector": (6, 48), "windows": (7, None)},
}
ALL_BLOCKS = BLOCK_VARIANTS | OF_HYBRIDS
# Whether a step is launched before the last one is read hangs on the proposer, not on its formulas:
# some of each run ahead, and the others in turn; each is a sweep. Both of MTP and of hybrids
# are deep: the few of these all run ahead.
RUN_AHEAD = ("flat", "parallel", "dflash", "dflash-windows", "dspark", "dspark-leading", "mtp-mimo")
RUN_AHEAD += ("dflash2", "dflash2-hybrid", "mtp-glm4_moe")
IN_TURN_TOO = ("mtp-mimo", "dflash2-hybrid")
# One of each kind of proposer, for what hangs on the kind alone: of a target of two layers.
FEW = (0, 1, 2)
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 50, "boundaries": FEW},
    "peagle": {"draft_vocab": 50, "parallel": True, "boundaries": FEW},
    "dflash": {"boundaries": FEW},
    "dspark": BLOCK_VARIANTS["dspark"] | {"boundaries": FEW},
    "mtp-mimo": {},
    "dflash2-hybrid": OF_HYBRIDS["dflash2-hybrid"],
}
Pair = tuple[Path, Path]  # a target and its head


@pytest.fixture
def target(tiny_model: Tiny) -> Path:
    return tiny_model("llama", num_hidden_layers=6)


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Tiny:
    return lambda **options: save_tiny_head(tmp_path / "head", target, **options)


def save_pair(target: Path, path: Path, name: str, options: dict[str, Any]) -> Pair:
    """For the given target, or one of the kind that the name asks for."""
    if "hybrid" in name:
        target = save_tiny_model(path.with_name("hybrid"), "qwen3_5_text")
    if name.startswith("mtp-"):
        model = save_tiny_mtp_model(path, name[4:], num_hidden_layers=3)
        return model, model
    save = save_tiny_head if name in VARIANTS or "eagle" in name else save_tiny_block_head
    return target, save(path, target, **options)


SLOW = ("dflash2-hybrid",)  # as the reference of delta nets is


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.deep if kind in SLOW else ()) for kind in KINDS]
)
def any_pair(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Tiny) -> Pair:
    target = tiny_model("llama", num_hidden_layers=2)
    return save_pair(target, tmp_path / "head", request.param, KINDS[request.param])


MIXED = [
    SAMPLED,
    replace(SAMPLED, seed=6, num_speculative_tokens=1),
    replace(SAMPLED, seed=7, num_speculative_tokens=0),
    replace(SAMPLED, seed=8, verification="block"),
]


@pytest.mark.parametrize(
    ("variant", "is_ahead"),
    [
        pytest.param(
            variant,
            is_ahead,
            marks=()
            if is_ahead == (variant in RUN_AHEAD)
            else pytest.mark.deep
            if variant in IN_TURN_TOO
            else pytest.mark.sweep,
            id=f"{variant}-{'ahead' if is_ahead else 'in-turn'}",
        )
        for variant in (*VARIANTS, *ALL_BLOCKS, "mtp-mimo", "mtp-glm4_moe")
        for is_ahead in (False, True)
    ],
)
def test_drafts_are_drawn_from_the_formulas(
    variant: str, is_ahead: bool, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts in chunks, and after every number of accepted drafts."""
    options = (VARIANTS | ALL_BLOCKS).get(variant, {})
    target, path = save_pair(target, tmp_path / "head", variant, options)
    engine = Engine(engine_config(target, path, k=K, max_num_batched_tokens=16))
    engine.scheduler.lag = int(is_ahead)
    checked = check_drafts(engine, Truth(target, path), monkeypatch)
    run(engine, prompts([21, 3, 9, 1], VOCAB), MIXED)
    stats = engine.stats()
    assert {0, 1, K} <= set(checked)
    drafted, accepted = stats.drafted_per_position, stats.accepted_per_position
    assert drafted[0] > accepted[0] > accepted[1] > accepted[2] > 0


@pytest.mark.parametrize("variant", ["flat", "layers", "parallel", "mtp-mimo", "mtp-glm4_moe"])
def test_of_prompts_the_last_layer_computes_the_rows_that_drafts_start_from(
    variant: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of sequences that decode beside them, whichever of their rows that is."""
    monkeypatch.setattr(attention, "_most_decoding", lambda num_seqs, _: num_seqs)
    target, path = save_pair(target, tmp_path / "head", variant, VARIANTS.get(variant, {}))
    config = engine_config(target, path, k=K, max_num_batched_tokens=16)
    engine = Engine(replace(config, enforce_eager=True))  # graphs do not call `of_rows`
    checked = check_drafts(engine, Truth(target, path), monkeypatch)
    head = source_of(engine)._head
    of_rows, computed = Block.of_rows, list[tuple[int, int]]()

    def noted(block: Block, kept: KeptRows, x: Tensor, *args: Any) -> Tensor:
        y = of_rows(block, kept, x, *args)
        if block is head.blocks[-1]:
            computed.append((len(x), len(y)))
        return y

    monkeypatch.setattr(Block, "of_rows", noted)
    run(engine, prompts([21, 3, 9, 1], VOCAB), MIXED)
    assert {0, 1, K} <= set(checked)
    assert (16, 1) in computed
    assert any(num_seqs > 1 for _, num_seqs in computed)
    assert all(num_seqs <= 4 for _, num_seqs in computed)
    accepted = engine.stats().accepted_per_position
    assert accepted[0] > accepted[1] > accepted[2] > 0


def test_greedy_answers_are_the_targets_own(target: Path, head: Tiny) -> None:
    engine = Engine(engine_config(target, head(draft_vocab=60, speculators=True), k=K))
    mixed = prompts([5, 30, 1], VOCAB)
    expected = [generate(target, prompt, GREEDY.max_tokens) for prompt in mixed]
    assert [tokens(o) for o in run(engine, mixed, GREEDY)] == expected


def test_nothing_but_the_draft_need_be_named(target: Path, head: Tiny) -> None:
    engine = Engine(engine_config(target, head()))
    assert engine.info.proposer == "eagle3"
    assert engine.info.draft_dtype == "float32"


HIT = prompts([24], VOCAB)[0]
# By the least that is cached of them: the same prompt again, a longer one; one with other tokens
# behind the pages that it shares; one of the first pages alone.
LATER: list[tuple[int, Callable[[list[int]], list[int]]]] = [
    (32, lambda hit: hit),
    (32, lambda hit: [*hit, 5, 6, 7]),
    (32, lambda hit: [*hit[:20], 90, 91, 92]),
    (8, lambda hit: hit[:9]),
]


def test_drafts_behind_a_cached_prefix_are_drawn_from_the_formulas(
    any_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the page's last row was computed with another token behind it."""
    target, path = any_pair
    engine = Engine(engine_config(target, path, k=K, page_size=4, state_interval=8))
    checked = check_drafts(engine, Truth(target, path), monkeypatch)
    few = replace(SAMPLED, seed=9, max_tokens=12)  # the prefix is right behind them
    for seed, (least, later) in enumerate(LATER):
        hit = prompts([24], VOCAB, seed)[0]
        run(engine, [hit], replace(SAMPLED, max_tokens=6))
        before = engine.stats().cached_tokens
        checked.clear()
        run(engine, [later(hit)], few)
        run(engine, [[*later(hit), 3]], few)
        assert max(checked) == K
        assert engine.stats().cached_tokens - before >= least


def test_samples_of_one_prompt_share_its_pages(
    target: Path, head: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = head()
    engine = Engine(engine_config(target, path, k=K, max_num_batched_tokens=16))
    check_drafts(engine, Truth(target, path), monkeypatch)
    run(engine, [HIT] * 3, [replace(SAMPLED, seed=seed) for seed in range(3)])
    assert engine.stats().cached_tokens >= 40


@pytest.mark.parametrize(
    "is_ahead",
    [pytest.param(False, marks=pytest.mark.sweep), True],
    ids=["in-turn", "ahead"],
)
def test_a_preempted_sequence_is_drafted_for_again(
    is_ahead: bool, any_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, path = any_pair
    engine = Engine(engine_config(target, path, k=K, num_pages=30))
    engine.scheduler.lag = int(is_ahead)
    checked = check_drafts(engine, Truth(target, path), monkeypatch)
    run(engine, prompts([9, 10, 11], VOCAB), [replace(SAMPLED, seed=seed) for seed in range(3)])
    assert engine.stats().preemptions > 0
    assert any(checked[-5:])


def test_a_k_of_zero_leaves_no_gap(any_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody drafts for a while; then drafts are drawn from all that was said meanwhile."""
    target, path = any_pair
    engine = Engine(engine_config(target, path, k=K))
    checked = check_drafts(engine, Truth(target, path), monkeypatch)
    engine.submit([NewRequest(request_id="0", prompt_token_ids=HIT, params=SAMPLED)])
    engine.scheduler.drafting.k = 0
    for _ in range(8):
        engine.step()
    assert not any(checked)
    engine.scheduler.drafting.k = K
    while engine.has_work():
        engine.step()
    assert checked.count(K) > 2


def test_a_head_that_fails_once_costs_drafts_alone(
    target: Path, head: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not read, it can never read; whoever comes later is drafted for again."""
    path = head()
    engine = Engine(engine_config(target, path, k=K))
    expected = generate(target, HIT, 24)
    checked = check_drafts(engine, Truth(target, path), monkeypatch)
    source = source_of(engine)
    read = source._reads

    def fail(*args: Any) -> Any:
        monkeypatch.setattr(source, "_reads", read)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(source, "_reads", fail)
    assert tokens(run(engine, [HIT], GREEDY)[0]) == expected
    assert not any(checked)
    run(engine, [HIT], SAMPLED)  # finds no pages that it has not read
    assert max(checked) == K


def test_a_bad_row_of_the_head_is_no_draft(
    target: Path, head: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(target, head(), k=K)
    engine = Engine(replace(config, enforce_eager=True))  # graphs do not call `logits`
    loaded = engine.worker.pair.head
    assert isinstance(loaded, Eagle3Head)
    logits = loaded.logits
    monkeypatch.setattr(loaded, "logits", lambda y: logits(y) * torch.nan)
    mixed = prompts([5, 9], VOCAB)
    expected = [generate(target, prompt, 24) for prompt in mixed]
    assert [tokens(o) for o in run(engine, mixed, GREEDY)] == expected
    sampled = SamplingParams(max_tokens=24, seed=1, temperature=0.7)
    assert all(len(tokens(o)) == 24 for o in run(engine, mixed, sampled))
    assert sum(engine.stats().drafted_per_position) > 0
    assert not any(engine.stats().accepted_per_position)


# With a cache the first answer finds nothing in it, and the others do. test_random_comparison.py
# has match at random, with each.
@pytest.mark.parametrize(
    "variant",
    [
        "ahead",
        pytest.param("in-turn", marks=pytest.mark.sweep),
        pytest.param("no-cache", marks=pytest.mark.sweep),
    ],
)
def test_match_gives_the_same_tokens_with_any_k(variant: str, any_pair: Pair) -> None:
    config = engine_config(*any_pair, k=K, prefix_caching=variant != "no-cache")
    engine = Engine(config)
    engine.scheduler.lag = int(variant == "ahead")
    params = SamplingParams(max_tokens=20, seed=3, temperature=1.5, verification="match")
    answers = [
        tokens(run(engine, [HIT], replace(params, num_speculative_tokens=k))[0])
        for k in (0, 1, 2, 3)
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert sum(engine.stats().accepted_per_position) > 0


def test_a_head_that_knows_the_next_token_is_always_right(tiny_model: Tiny, tmp_path: Path) -> None:
    """Planted: the token behind another follows from that one alone, in the target and the head."""
    path = tiny_model("llama", num_hidden_layers=6, seed=11)
    target, head = tmp_path / "target", tmp_path / "head"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(VOCAB, 32, generator=generator))
    follows = torch.randperm(VOCAB, generator=generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight[follows] = embedding
    model.save_pretrained(target)
    save_tiny_head(head, target, seed=1)
    tensors = tensors_of(head)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"].zero_()
    # Of the states only g_t is left in r, which shows x_t: two tokens on is what row t predicts.
    tensors["fc.weight"] = torch.cat([torch.eye(32), torch.zeros(32, 64)], 1)
    tensors["norm.weight"] = torch.ones(32)
    tensors["lm_head.weight"][follows[follows]] = embedding
    save_file(tensors, head / "model.safetensors")
    engine = Engine(engine_config(target, head, k=1))
    run(engine, prompts([5, 9, 17], VOCAB), GREEDY)
    stats = engine.stats()
    assert stats.drafted_per_position == stats.accepted_per_position
    assert stats.drafted_per_position[0] > 20


def test_nothing_of_an_ended_sequence_lives_on_in_its_heads_proposer(any_pair: Pair) -> None:
    target, path = any_pair
    engine = Engine(engine_config(target, path, k=K))
    engine.submit([NewRequest(request_id="0", prompt_token_ids=HIT, params=GREEDY)])
    ended = weakref.ref(engine.sequences.by_id["0"])
    while engine.has_work():
        engine.step()
    gc.collect()
    assert ended() is None


def test_a_rehearsal_for_nobody_leaves_nothing_behind(any_pair: Pair) -> None:
    target = any_pair[0]
    config = engine_config(*any_pair, k=K, max_num_seqs=4)
    engine = Engine(replace(config, enforce_eager=True))  # graphs would still use the first pages
    engine.worker.allocate(1)
    engine.worker.rehearse()
    engine.worker.allocate(512)
    engine.start_over()
    (outputs,) = run(engine, [HIT], GREEDY)
    assert tokens(outputs) == generate(target, HIT, GREEDY.max_tokens)

"""Many steps under every edit of logits, against exact enumeration of the edited target."""

from dataclasses import replace
from pathlib import Path

import pytest
from block_heads import save_tiny_block_head
from distributions import bound, chi_squared, total_variation
from engines import run, sampling_config
from heads import save_tiny_head
from target_distribution import joint, sample
from tiny_models import Quick

from outrider.engine.api import ProcessorChoice, SamplingParams, ThinkingBudget, Verification
from outrider.engine.config import CacheConfig
from outrider.engine.engine import Engine

VOCAB = 4
PROMPT = [2, 0, 3]
NUM_SAMPLES = 2400
PLAIN = SamplingParams(max_tokens=4)
EDITS = {
    "repetition": replace(PLAIN, repetition_penalty=4.0),
    "frequency": replace(PLAIN, frequency_penalty=1.2),
    "presence": replace(PLAIN, presence_penalty=-1.5),
    "bias": replace(PLAIN, logit_bias={1: 1.5, 2: -0.7}),
    "allowed": replace(PLAIN, allowed_token_ids=(0, 2, 3)),
    "bad_words": replace(PLAIN, bad_words=((0, 2), (3, 3, 1), (1, 1), (3, 0))),
    "min_tokens": replace(PLAIN, min_tokens=2, stop_token_ids=(3, 0)),
    # After 1 and 2 nothing is left but the ends.
    "min_tokens_alone": replace(
        PLAIN, min_tokens=3, stop_token_ids=(3, 0), bad_words=((1, 1), (1, 2), (2, 1), (2, 2))
    ),
    "thinking": replace(
        PLAIN,
        max_tokens=5,
        thinking=ThinkingBudget(num_tokens=1, open_token_id=0, close_token_id=1),
    ),
    # The prompt has spent two of four tokens, and a thought may open again.
    "thinking_begun": replace(
        PLAIN,
        thinking=ThinkingBudget(num_tokens=3, open_token_id=2, close_token_id=1, begun=True),
    ),
    "penalties": replace(
        PLAIN, repetition_penalty=2.0, frequency_penalty=0.8, presence_penalty=-0.5, top_p=0.95
    ),
    "processor": replace(PLAIN, logits_processors=(ProcessorChoice("parity", {"bias": 1.5}),)),
}
EDITS["all"] = replace(
    PLAIN,
    temperature=1.3,
    top_p=0.95,
    repetition_penalty=1.5,
    frequency_penalty=0.6,
    presence_penalty=-0.4,
    logit_bias={1: 0.8},
    allowed_token_ids=(0, 1, 3),
    bad_words=((0, 3), (1, 1)),
    min_tokens=2,
    stop_token_ids=(0,),
    logits_processors=(ProcessorChoice("parity", {"bias": 0.5}),),
)
RULES: tuple[Verification, ...] = ("token", "block", "match")
SOME = [("all", rule, "draft_model") for rule in RULES] + [
    ("bad_words", "match", "draft_model"),
    ("min_tokens", "token", "draft_model"),
    ("min_tokens_alone", "block", "draft_model"),
    ("min_tokens_alone", "token", "suffix"),
    ("thinking", "block", "draft_model"),
    ("thinking", "token", "suffix"),
    ("thinking_begun", "token", "draft_model"),
    ("thinking_begun", "match", "suffix"),
    ("frequency", "block", "suffix"),
    ("all", "token", "suffix"),
]
# A head's drafts are edited in the phase that draws them, those of a block one after another.
SOME += [
    ("penalties", "block", "draft_model"),
    ("penalties", "token", "eagle3"),
    ("penalties", "block", "dflash"),
]
SOURCES = ("draft_model", "eagle3", "dflash", "suffix")
EVERY = [(name, rule, by) for name in EDITS for rule in RULES for by in SOURCES]


@pytest.mark.parametrize(
    ("name", "rule", "proposer"),
    [
        pytest.param(*case, marks=() if case in SOME else pytest.mark.sweep, id="-".join(case))
        for case in EVERY
    ],
)
def test_the_joint_is_the_edited_targets(
    name: str, rule: Verification, proposer: str, quick_model: Quick, tmp_path: Path
) -> None:
    is_head = proposer in ("eagle3", "dflash")
    target, draft = quick_model(3, 2 if is_head else 1), quick_model(4)  # heads read between layers
    if is_head:
        save = save_tiny_head if proposer == "eagle3" else save_tiny_block_head
        draft, proposer = save(tmp_path, target, boundaries=(0, 1, 2), scale=0.2), "draft_model"
    config = sampling_config(target, draft, proposer)
    specs = ("parity = logits_processors:FavourParity",)
    engine = Engine(replace(config, logits_processors=specs))
    params = replace(EDITS[name], verification=rule)
    truth = joint(target, PROMPT, params)
    counts = sample(engine, PROMPT, params, max_k=3, n=NUM_SAMPLES)
    assert counts.keys() <= truth.keys()
    assert total_variation(truth, counts) < bound(len(truth), NUM_SAMPLES)
    assert chi_squared(truth, counts) < 1
    # An engine that ignored the edit would have failed.
    assert total_variation(joint(target, PROMPT, PLAIN), counts) > bound(VOCAB**4, NUM_SAMPLES)
    assert sum(engine.stats().accepted_per_position) > 0


@pytest.mark.parametrize("verification", ["token", "match"])
def test_drafts_lead_into_dead_ends_as_often_as_plain_tokens_do(
    verification: Verification, quick_model: Quick
) -> None:
    target, draft = quick_model(3), quick_model(4)
    # About every second answer begins with 0, and nothing may follow that.
    params = SamplingParams(
        max_tokens=2,
        temperature=20.0,
        allowed_token_ids=(0, 1),
        bad_words=((0, 0), (0, 1)),
        verification=verification,
    )
    config = replace(
        sampling_config(target, draft, "draft_model"), cache=CacheConfig(num_pages=999)
    )
    num_ends = []
    for k in (0, 3):
        seeded = [replace(params, seed=i, num_speculative_tokens=k) for i in range(480)]
        ends = [outputs[-1] for outputs in run(Engine(config), [PROMPT] * len(seeded), seeded)]
        assert all(end.is_dead_end for end in ends if end.finish_reason == "error")
        num_ends.append(sum(end.finish_reason == "error" for end in ends))
    if verification == "match":
        assert num_ends[0] == num_ends[1]
    assert abs(num_ends[0] - num_ends[1]) < 4 * (480 / 2) ** 0.5  # four standard deviations
    assert num_ends[0] > 150

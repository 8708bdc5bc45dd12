"""Many steps under a grammar, against exact enumeration of the target's masked distribution."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributions import bound, chi_squared, total_variation
from engines import sampling_config
from grammars import stands_for
from target_distribution import sample
from transformers import AutoModelForCausalLM

from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine

LETTERS, EOS, VOCAB = "abc", 3, 4
LENGTH = 4
PROMPT = [2, 0, 3]
PATTERN = "(ab?c?){1,3}"
NUM_SAMPLES = 2400  # over some thirty outputs
# All there is of the grammar, and all its beginnings, by brute force.
TEXTS = {
    text
    for length in range(10)
    for text in map("".join, itertools.product(LETTERS, repeat=length))
    if re.fullmatch(PATTERN, text)
}
BEGINNINGS = {text[:i] for text in TEXTS for i in range(len(text) + 1)}


def allowed(text: str) -> list[bool]:
    return [*(text + letter in BEGINNINGS for letter in LETTERS), text in TEXTS]


def joint(path: Path, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every output: of LENGTH tokens, or fewer with eos at the end."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found, open_ones = {}, {(): 1.0}
    for _ in range(LENGTH):
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *tokens] for tokens in open_ones])).logits
        going_on = {}
        for (prefix, chance), row in zip(open_ones.items(), logits[:, -1].double(), strict=True):
            mask = torch.tensor(allowed("".join(LETTERS[i] for i in prefix)))
            row = row.masked_fill(~mask, -torch.inf)
            if params.top_k:
                row = row.masked_fill(row < row.topk(params.top_k).values[-1], -torch.inf)
            for token, p in enumerate((row / params.temperature).softmax(-1).tolist()):
                if p > 0:
                    (found if token == EOS else going_on)[*prefix, token] = chance * p
        open_ones = going_on
    return found | open_ones


@pytest.mark.parametrize(
    ("proposer", "params"),
    [
        ("draft_model", SamplingParams(max_tokens=LENGTH, verification="token")),
        ("draft_model", SamplingParams(max_tokens=LENGTH, verification="block")),
        ("draft_model", SamplingParams(max_tokens=LENGTH, verification="match", temperature=1.4)),
        ("suffix", SamplingParams(max_tokens=LENGTH, top_k=2, temperature=2.0)),
    ],
    ids=["token", "block", "match", "suffix"],
)
def test_the_joint_is_that_of_the_masked_target(
    proposer: str, params: SamplingParams, tiny_model: Callable[..., Path]
) -> None:
    target = tiny_model("llama", seed=3, vocab_size=VOCAB, scale=0.15, num_hidden_layers=1)
    draft = tiny_model("llama", seed=4, vocab_size=VOCAB, scale=0.15, num_hidden_layers=1)
    config = sampling_config(target, draft, proposer)
    engine = Engine(replace(config, token_table=stands_for(*LETTERS), eos_token_ids=(EOS,)))
    truth = joint(target, params)
    assert sum(truth.values()) == pytest.approx(1)
    assert 0.02 < max(truth.values()) < 0.6
    params = replace(params, grammar=f"start: /{PATTERN}/")
    counts = sample(engine, PROMPT, params, max_k=3, n=NUM_SAMPLES)
    assert counts.keys() <= truth.keys()
    assert total_variation(truth, counts) < bound(len(truth), NUM_SAMPLES)
    assert chi_squared(truth, counts) < 1
    assert sum(engine.stats().accepted_per_position) > 0

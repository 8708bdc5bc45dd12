"""`match` draws in two stages; over both the tokens must still follow p."""

import pytest
import torch
from verification import DEVICE, make_sampling, on_road

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.sampling import BLOCK, Rule
from outrider.kernels.verify import draft_sample

# Tokens whose noise the first blocks' would be, if the two stages shared it, and others.
CHANCES = {0: 0.15, 1: 0.3, BLOCK: 0.1, BLOCK + 700: 0.15, 2 * BLOCK + 2: 0.3}


@pytest.mark.parametrize("top_k", [0, 4])
def test_match_draws_from_p_over_blocks(top_k: int, road: str) -> None:
    if road == "kernel" and INTERPRET:
        pytest.skip("a second a draw; other tests hold the kernel to the reference")
    num_draws = 1000
    vocab = 2 * BLOCK + 3
    logits = torch.full((vocab,), -torch.inf)
    for token, chance in CHANCES.items():
        logits[token] = float(torch.tensor(chance).log())
    kept = dict(sorted(CHANCES.items(), key=lambda item: -item[1])[: top_k or None])
    sampling = make_sampling(num_draws, rule=Rule.MATCH, top_k=top_k)
    positions = torch.arange(num_draws, device=DEVICE)
    with on_road(road):
        rows = logits.to(DEVICE).expand(num_draws, -1)
        tokens = draft_sample(rows, sampling, positions, positions, vocab).token_ids
    counts = torch.bincount(tokens.cpu(), minlength=vocab)
    assert int(counts.sum()) == int(counts[list(kept)].sum())
    total = sum(kept.values())
    chi2 = 0.0
    for token, chance in kept.items():
        expected = num_draws * chance / total
        chi2 += float(counts[token] - expected) ** 2 / expected
    assert chi2 < 25  # of 3 or 4 degrees of freedom: by chance once in 20,000 runs

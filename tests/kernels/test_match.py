"""`match` draws its noise by groups of tokens; the variates must stay independent and alike."""

import pytest
import torch
from verification import DEVICE, draw_draft, make_sampling, on_road

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.verify.match import noise_reference
from outrider.kernels.verify.sampling import BLOCK, GROUP, Rule

# Two tokens of one group, and others.
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
        tokens = draw_draft(rows, sampling, positions, positions, vocab).token_ids
    counts = torch.bincount(tokens.cpu(), minlength=vocab)
    assert int(counts.sum()) == int(counts[list(kept)].sum())
    total = sum(kept.values())
    chi2 = 0.0
    for token, chance in kept.items():
        expected = num_draws * chance / total
        chi2 += float(counts[token] - expected) ** 2 / expected
    assert chi2 < 25  # of 3 or 4 degrees of freedom: by chance once in 20,000 runs


def test_noise_of_every_token_is_unit_exponential() -> None:
    """Its mean, and that of the two least of a group, which come apart if they are not together."""
    rows = 4000
    seed = torch.arange(rows) * 0x9E3779B97F4A7C1
    noise = noise_reference(seed, torch.full_like(seed, 7), 2 * GROUP)
    mean_error = 5 / rows**0.5
    assert (noise.mean(0) - 1).abs().max() < mean_error
    least = noise.view(rows, 2, GROUP).sort(-1).values[..., :2]
    assert (least[..., 0].mean(0) * GROUP - 1).abs().max() < mean_error
    assert ((least[..., 1] - least[..., 0]).mean(0) * (GROUP - 1) - 1).abs().max() < mean_error

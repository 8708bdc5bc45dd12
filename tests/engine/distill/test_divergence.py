"""The divergences and their gradients, against autograd over the whole distribution."""

import pytest
import torch

from outrider.distill.divergence import DIVERGENCES, agreement, mean_divergence

FORMULAS = {
    "forward_kl": lambda p, q: (p * (p.log() - q.log())).sum(-1),
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
}


@pytest.mark.parametrize("num_top", [16, 5])
@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_loss_and_gradient_are_those_of_the_formula(name: str, num_top: int) -> None:
    generator = torch.Generator().manual_seed(0)
    target = (torch.randn(6, 17, generator=generator) * 2).log_softmax(-1)
    logits = (torch.randn(6, 17, generator=generator) * 2).requires_grad_()
    top, ids = target.topk(num_top)
    loss = mean_divergence(name, ids, top, logits, weight=2)
    loss.backward()

    exact = logits.detach().double().requires_grad_()
    q = exact.softmax(-1)
    # Outside of the top, the target's mass is spread as the draft spreads its own.
    fixed = q.detach()
    is_top = torch.zeros(6, 17, dtype=torch.bool).scatter(1, ids, True)
    rest = 1 - top.double().exp().sum(-1, keepdim=True)
    spread = fixed * rest / (fixed * ~is_top).sum(-1, keepdim=True)
    p = torch.where(is_top, target.double().exp(), spread)
    expected = 2 * FORMULAS[name](p, q).mean()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-3, atol=1e-6)


def test_agreement_counts_equal_first_choices_and_the_overlap() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2], [0.8, 0.1, 0.1]]).log()
    ids = torch.tensor([[0, 1], [2, 0]])  # the second target: 0.1, 0.1, 0.8
    draft = torch.tensor([[0.6, 0.1, 0.3], [0.5, 0.4, 0.1]]).log()
    same, overlap = agreement(ids, target[:, :2], draft)
    assert same == 1
    torch.testing.assert_close(overlap, torch.tensor(0.5 + 0.1 + 0.1 + 0.1))

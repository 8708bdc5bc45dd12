"""Where benchmarks set which drafts are accepted, for heads of random weights: by the seeds."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verification import DEVICE, HAS_KERNELS

from outrider.engine.scoring import verifier

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BATCH, K = 256, 4


@pytest.mark.parametrize(
    ("digits", "num_tokens", "chance"), [(27, 128, 0.2), (27, 64, 0.7), (90, 128, 0.9), (90, 64, 0)]
)
def test_drafts_are_accepted_as_a_digit_of_their_seed_says(
    digits: int, num_tokens: int, chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import set_acceptance

    def verify(logits, cu_rows, slots, slot, num_drafts, k):  # type: ignore[no-untyped-def]
        return torch.full((BATCH, k + 2), 5, dtype=torch.int32, device=DEVICE)

    monkeypatch.setattr(verifier, "verify", verify)
    set_acceptance.set_acceptance_by_seed()
    number = torch.arange(BATCH, device=DEVICE)
    slots = SimpleNamespace(
        token_ids=torch.full((BATCH, 256), 7, dtype=torch.int32, device=DEVICE),
        num_tokens=num_tokens + number % 60,
        sampling=SimpleNamespace(seed=100 * number + digits),
    )
    before, num_drafts = slots.num_tokens.clone(), torch.full_like(number, K).int()
    out = verifier.verify(torch.empty(0, device=DEVICE), None, slots, number, num_drafts, K)  # type: ignore[arg-type]
    accepted = slots.num_tokens - before - 1
    assert torch.equal((out[:, : K + 1] == 7).sum(1), accepted)
    of_first = (accepted > 0).float().mean().item()
    assert of_first == pytest.approx(chance, abs=0.08)

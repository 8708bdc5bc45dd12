"""Raw logprobs: the log-softmax, in a deterministic order, one float a token."""

import pytest
import torch
from verification import DEVICE, on_road

from outrider.kernels.verify.logprobs import gather_logprobs, logprobs_at


@pytest.mark.parametrize("vocab", [3, 70, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logprobs_are_the_log_softmax(vocab: int, dtype: torch.dtype, road: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(4, vocab + 5, generator=generator) * 3).to(dtype)
    ids, num_top = torch.tensor([0, 1, 2, vocab - 1]), min(vocab, 6)
    with on_road(road):
        found = gather_logprobs(logits.to(DEVICE), ids.to(DEVICE), num_top, vocab)
    truth = logits[:, :vocab].double().log_softmax(-1)
    order = sorted(range(vocab), key=lambda i: (-float(logits[0, i]), i))[:num_top]
    assert found.top_ids[0].tolist() == order
    chosen = truth.gather(1, ids[:, None])[:, 0]
    assert torch.allclose(found.logprob.cpu().double(), chosen, atol=1e-5)
    top = truth.gather(1, found.top_ids.cpu())
    assert torch.allclose(found.top_logprobs.cpu().double(), top, atol=1e-5)


def test_token_and_its_entry_among_the_best_are_the_same_float(road: str) -> None:
    logits = torch.randn(5, 1500, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with on_road(road):
        best = gather_logprobs(logits, torch.zeros(5, dtype=torch.int64, device=DEVICE), 3, 1500)
        again = gather_logprobs(logits, best.top_ids[:, 1].contiguous(), 3, 1500)
    assert torch.equal(again.logprob, again.top_logprobs[:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_further_ids_have_the_log_softmax_and_the_token_its_own_float(
    dtype: torch.dtype, road: str
) -> None:
    logits = torch.randn(4, 1500, generator=torch.Generator().manual_seed(3)).mul(9).to(dtype)
    logits, ids = logits.to(DEVICE), torch.tensor([0, 7, -1, 1499], device=DEVICE)
    wanted = torch.tensor([[0, 3], [7, 7], [5, 0], [1498, 1499]], device=DEVICE)
    with on_road(road):
        found = gather_logprobs(logits, ids, 0, 1500)
    values = logprobs_at(logits, ids, found.logprob, wanted)
    truth = logits.double().log_softmax(-1).gather(1, wanted)
    assert torch.allclose(values.double(), truth, atol=1e-5)
    assert torch.equal(values[[0, 1, 3], [0, 1, 1]], found.logprob[[0, 1, 3]])


def test_equals_come_by_id_within_and_across_groups(road: str) -> None:
    logits = torch.zeros(1, 1300)
    logits[0, [7, 8, 900, 1200]] = 2.0
    with on_road(road):
        found = gather_logprobs(
            logits.to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE), 6, 1300
        )
    assert found.top_ids.tolist() == [[7, 8, 900, 1200, 0, 1]]


def test_no_alternatives(road: str) -> None:
    with on_road(road):
        found = gather_logprobs(
            torch.zeros(2, 4, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE), 0, 4
        )
    assert found.top_ids.shape == (2, 0)
    assert found.logprob.tolist() == pytest.approx([-1.3862944, -1.3862944])


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_broken_row_and_padded_token_leave_the_others_alone(broken: float, road: str) -> None:
    logits = torch.randn(3, 1100, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logits[1] = broken
    ids = torch.tensor([5, -1, 1 << 40], device=DEVICE)
    with on_road(road):
        found = gather_logprobs(logits, ids, 4, 1100)
        alone = gather_logprobs(logits[:1], ids[:1], 4, 1100)
    assert torch.equal(found.logprob[:1], alone.logprob)
    assert torch.equal(found.top_ids[:1], alone.top_ids)
    assert int(found.top_ids.min()) >= 0
    assert int(found.top_ids.max()) < 1100


@pytest.mark.parametrize("vocab", [70, 1100])  # the last group is padded
def test_a_bad_row_gives_no_id_beyond_the_vocabulary(vocab: int, road: str) -> None:
    logits = torch.full((6, vocab + 30), 9.0)
    for row, broken in enumerate((torch.nan, -torch.nan, -torch.inf), 1):  # NaN of either sign
        logits[row, :vocab] = broken
    logits[4, 1], logits[5, 2] = torch.nan, torch.inf
    ids = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    with on_road(road):
        found = gather_logprobs(logits.to(DEVICE), ids, 9, vocab)
    assert found.top_ids.tolist() == [list(range(9))] * 6
    assert found.top_logprobs[1:].isnan().all()


def test_alternatives_go_on_among_tokens_without_a_chance(road: str) -> None:
    """More are asked for than have a finite logit: the others follow by id, each once."""
    logits = torch.full((1, 1100), -torch.inf)
    logits[0, [1099, 5]] = torch.tensor([1.0, -0.0])
    logits[0, 900] = 0.0  # ties with -0.0
    with on_road(road):
        found = gather_logprobs(
            logits.to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE), 70, 1100
        )
    rest = [i for i in range(68) if i != 5]
    assert found.top_ids[0].tolist() == [1099, 5, 900, *rest]
    assert (found.top_logprobs[0, 3:] == -torch.inf).all()


def test_more_alternatives_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="num_top 9"):
        gather_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), 9, 4)

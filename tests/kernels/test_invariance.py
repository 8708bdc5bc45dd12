"""Proof 4: a request's tokens do not depend on its company, its row or padding."""

from typing import NamedTuple

import pytest
import torch
from grids import pairwise
from verification import (
    DEVICE,
    DRAWING_ROADS,
    HAS_KERNELS,
    Batch,
    cu_rows_of,
    draw_draft,
    equal,
    make_sampling,
    mixed_sampling,
    on_road,
    verify,
)

from outrider.kernels.verify import finish
from outrider.kernels.verify.sampling import Rule, Sampling

VOCAB = 1300


class Request(NamedTuple):
    target: torch.Tensor  # [k + 1, V]
    draft: torch.Tensor  # [k, V]
    sampling: Sampling  # of one request
    position: int


def make_request(seed: int, k: int, **parameters: object) -> Request:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(k + 1, VOCAB, generator=generator) * 3
    draft = target[:k] + torch.randn(k, VOCAB, generator=generator)
    sampling = make_sampling(1, seed=seed, **parameters)  # type: ignore[arg-type]
    return Request(target.to(DEVICE), draft.to(DEVICE), sampling, 10 + seed)


def run(
    requests: list[Request], road: str, k_padding: int = 0, row_padding: int = 0, width: int = VOCAB
) -> list[list[int]]:
    """Tokens of each request, drafting and verifying all of them in one batch."""
    counts = [len(request.draft) for request in requests]
    batch, k_max = len(requests), max(counts) + k_padding
    sampling = Sampling(
        *(torch.cat(f) for f in zip(*(request.sampling for request in requests), strict=True))
    )
    positions = torch.tensor([request.position for request in requests], device=DEVICE)
    num_drafts = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    logits = torch.full((batch, k_max, VOCAB), torch.nan, device=DEVICE)
    for i, request in enumerate(requests):
        logits[i, : counts[i]] = request.draft
    ids = torch.full((batch, k_max), -1, dtype=torch.int64, device=DEVICE)
    state = torch.full((batch, k_max, 4), torch.nan, device=DEVICE)
    target = torch.full((sum(counts) + batch + row_padding, width), torch.nan, device=DEVICE)
    target[: sum(counts) + batch, :VOCAB] = torch.cat([request.target for request in requests])
    with on_road(road):
        for j in range(max(counts)):
            drawn = draw_draft(logits[:, j], sampling, positions + j, positions, VOCAB)
            real = num_drafts > j
            ids[real, j], state[real, j] = drawn.token_ids[real], drawn.state[real]
        verified = verify(
            target, cu_rows_of(num_drafts), ids, num_drafts, logits, state, sampling, positions,
            VOCAB,
        )  # fmt: skip
    assert not verified.is_bad.any()
    pairs = zip(verified.token_ids.tolist(), verified.num_tokens.tolist(), strict=True)
    return [tokens[:n] for tokens, n in pairs]


@pytest.mark.parametrize(
    ("rule", "filters", "road"),
    pairwise(list(Rule), [{}, {"top_k": 20, "top_p": 0.9}], DRAWING_ROADS),
)
def test_tokens_are_the_same_alone_and_in_company(
    rule: Rule, filters: dict[str, float], road: str
) -> None:
    mine = make_request(1, 2, rule=rule, **filters)
    mates = [
        make_request(2, 3, top_k=5, rule=Rule.BLOCK),
        make_request(3, 0, temperature=0.0),
        make_request(4, 1, top_p=0.5, rule=Rule.MATCH),
    ]
    alone = run([mine], road)[0]
    company = run([mine, *mates, mine], road)
    assert company[0] == company[-1] == alone
    assert run([mates[1], mine], road, k_padding=3, row_padding=5, width=VOCAB + 13)[1] == alone


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_match_gives_the_same_tokens_whatever_k(temperature: float, road: str) -> None:
    """Reproducible with speculation on, off, or any k: each row's token is the position's own."""
    full = make_request(9, 3, rule=Rule.MATCH, temperature=temperature)
    full = full._replace(draft=full.target[:3])  # every draft is accepted, so every row is compared
    plain = []
    for row in range(4):
        request = full._replace(
            target=full.target[row : row + 1], draft=full.draft[:0], position=full.position + row
        )
        plain += run([request], road)[0]
    tokens = run([full], road)[0]
    assert tokens == plain


def test_rules_of_a_batch_do_not_mix(road: str) -> None:
    requests = [make_request(20, 2, rule=rule) for rule in Rule]
    assert run(requests, road) == [run([request], road)[0] for request in requests]


@pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
def test_programs_that_share_a_request_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    batch = Batch(generator, [2] * 4, 3000, torch.bfloat16, mixed_sampling(4, 1))
    results = []
    for num_programs in (1, 12, 1000):
        monkeypatch.setattr(finish, "num_programs", lambda *_, n=num_programs: n)
        results.append(batch.verify("kernel"))
    assert equal(results[0], batch.verify("reference"))
    assert all(equal(result, results[0]) for result in results)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_promises_to_the_kernels_change_no_token(temperature: float, road: str) -> None:
    generator = torch.Generator().manual_seed(2)
    sampling = make_sampling(2, temperature=temperature)
    batch = Batch(generator, [2, 0], 200, torch.float32, sampling)
    with on_road(road):
        promised = verify(
            batch.target_logits, batch.cu_rows, batch.draft_ids, batch.num_drafts,
            batch.draft_logits, batch.state, sampling, batch.positions, batch.vocab_size,
            filters=False, draws=temperature > 0,
        )  # fmt: skip
    assert equal(promised, batch.verify(road))

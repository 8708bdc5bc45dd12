"""Proof 6: the edges, and bugs that other implementations have had."""

import math

import pytest
import torch
from grids import pairwise
from verification import (
    DEVICE,
    DRAWING_ROADS,
    Verified,
    cu_rows_of,
    draw_draft,
    make_sampling,
    on_road,
    verify,
    word_of,
)

from outrider.kernels.verify.sampling import BLOCK, Rule

INF, NAN = torch.inf, torch.nan


def run(
    road: str,
    target: torch.Tensor,
    drafts: list[list[int]],
    draft_logits: torch.Tensor | None = None,
    vocab: int | None = None,
    words: torch.Tensor | None = None,
    num_drafts: list[int] | None = None,
    **parameters: object,
) -> Verified:
    """Requests with `drafts`; target rows in order, draft_logits [B, K, V]."""
    batch = len(drafts)
    counts = num_drafts or [len(d) for d in drafts]
    k_max = max(len(d) for d in drafts)
    ids = torch.full((batch, k_max), -1, dtype=torch.int64)
    for i, d in enumerate(drafts):
        ids[i, : len(d)] = torch.tensor(d, dtype=torch.int64)
    sampling = make_sampling(batch, **parameters)  # type: ignore[arg-type]
    vocab = vocab or target.shape[1]
    count = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    positions = torch.full((batch,), 3, device=DEVICE)
    state = None
    with on_road(road):
        if draft_logits is not None:
            draft_logits = draft_logits.to(DEVICE)
            states = [
                draw_draft(draft_logits[:, j], sampling, positions, positions, vocab).state
                for j in range(k_max)
            ]
            state = torch.stack(states, 1)
        return verify(
            target.to(DEVICE), cu_rows_of(count), ids.to(DEVICE), count, draft_logits, state,
            sampling, positions, vocab, words=None if words is None else words.to(DEVICE),
        )  # fmt: skip


def accept_words(k: int, u: float, batch: int = 1) -> torch.Tensor:
    words = torch.zeros(batch, k + 2, 4, dtype=torch.int64)
    words[:, :k, 0] = word_of(u)
    return words


@pytest.mark.parametrize("rule", list(Rule))
def test_greedy_is_the_argmax_comparison_under_every_rule(rule: Rule, road: str) -> None:
    target = torch.tensor([[0.0, 3, 1], [5, 0, 0], [0, 0, 2], [0, 0, 2], [1, 0, 0]])
    verified = run(road, target, [[1, 0], [0]], temperature=0.0, rule=rule)
    assert verified.token_ids.tolist() == [[1, 0, 2], [2, -1, -1]]
    assert verified.num_tokens.tolist() == [3, 1]


def test_greedy_ties_go_to_the_lowest_id_and_never_to_padding(road: str) -> None:
    target = torch.zeros(1, 2600)
    target[:, 2590:] = 9.0
    verified = run(road, target, [[]], vocab=2590, temperature=0.0)
    assert verified.token_ids.tolist() == [[0]]
    target[0, 1500] = target[0, 2100] = 4.0
    assert run(road, target, [[]], vocab=2590, temperature=0.0).token_ids.tolist() == [[1500]]


def test_ids_past_the_vocabulary_are_never_drawn(road: str) -> None:
    target = torch.full((8, 12), 50.0)
    target[:, :5] = 0.0
    for rule in (Rule.TOKEN, Rule.MATCH):
        tokens = run(road, target, [[] for _ in range(8)], vocab=5, rule=rule).token_ids
        assert int(tokens.max()) < 5


@pytest.mark.parametrize("rule", list(Rule))
def test_one_allowed_token_is_always_given(rule: Rule, road: str) -> None:
    target = torch.full((2, 30), -INF)
    target[:, 17] = -2.0
    verified = run(road, target, [[17]], target[None, :1].clone(), rule=rule)
    assert verified.token_ids.tolist() == [[17, 17]]


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_equal_models_accept_everything_at_any_uniform(rule: Rule, road: str) -> None:
    row = torch.tensor([0.3, -1.0, 2.0, 0.0])
    target, draft = row.expand(3, 4).contiguous(), row.expand(1, 2, 4).contiguous()
    words = accept_words(2, 1.0)
    verified = run(road, target, [[0, 1]], draft, words=words, rule=rule)
    assert verified.num_tokens.tolist() == [3]


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_disjoint_supports_accept_nothing(rule: Rule, road: str) -> None:
    target = torch.tensor([[0.0, 0.0, -INF, -INF]]).repeat(2, 1)
    draft = torch.tensor([[[-INF, -INF, 0.0, 0.0]]])
    verified = run(road, target, [[2]], draft, words=accept_words(1, 1e-7), rule=rule)
    assert verified.num_tokens.tolist() == [1]
    assert int(verified.token_ids[0, 0]) in (0, 1)


def test_draft_that_its_distribution_excludes_is_rejected(road: str) -> None:
    target = torch.zeros(2, 4)
    draft = torch.tensor([[[0.0, 0.0, 0.0, -INF]]])
    verified = run(road, target, [[3]], draft, words=accept_words(1, 1e-7))
    assert verified.num_tokens.tolist() == [1]


@pytest.mark.parametrize("draft", [-1, 4, 1_000_000])
def test_draft_that_is_no_token_is_rejected(draft: int, road: str) -> None:
    for temperature in (0.0, 1.0):
        verified = run(road, torch.zeros(2, 4), [[draft]], temperature=temperature)
        assert verified.num_tokens.tolist() == [1]
        assert 0 <= int(verified.token_ids[0, 0]) < 4


@pytest.mark.parametrize(
    ("rule", "settings", "poison", "road"),
    pairwise(
        list(Rule),
        [
            {"temperature": 0.0, "top_k": 0},
            {"temperature": 1.0, "top_k": 0},
            {"temperature": 1.0, "top_k": 2},
        ],
        [NAN, INF],
        DRAWING_ROADS,
    ),
)
def test_nan_fails_its_own_request_alone(
    rule: Rule, settings: dict[str, float], poison: float, road: str
) -> None:
    clean = torch.randn(2, 2048, generator=torch.Generator().manual_seed(0))
    dirty = clean.clone()
    dirty[1, 1700] = poison
    alone = run(road, clean, [[], []], rule=rule, **settings)
    verified = run(road, dirty, [[], []], rule=rule, **settings)
    assert verified.is_bad.tolist() == [False, True]
    assert verified.token_ids[0].tolist() == alone.token_ids[0].tolist()
    assert 0 <= int(verified.token_ids[1, 0]) < 2048


def test_row_without_a_finite_logit_is_bad(road: str) -> None:
    for temperature in (0.0, 1.0):
        verified = run(road, torch.full((1, 9), -INF), [[]], temperature=temperature)
        assert verified.is_bad.tolist() == [True]


def test_bad_row_that_was_not_needed_is_not_held_against_the_request(road: str) -> None:
    target = torch.tensor([[0.0, 9.0], [NAN, 0.0]])
    verified = run(road, target, [[0]], temperature=0.0)
    assert verified.is_bad.tolist() == [False]
    assert verified.token_ids.tolist() == [[1, -1]]


def test_bad_draft_row_becomes_a_one_hot_draft(road: str) -> None:
    """Nobody's request fails because of the draft: the draft is token 0, its q one-hot."""
    draft = torch.tensor([[[NAN, 0.0, 0.0, 0.0]]])
    target = torch.tensor([[0.0, 0.0, -INF, -INF]]).repeat(2, 1)
    positions = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with on_road(road):
        drawn = draw_draft(draft[:, 0].to(DEVICE), make_sampling(1), positions, positions, 4)
    assert drawn.token_ids.tolist() == [0]
    kept = run(road, target, [[0]], draft, words=accept_words(1, 0.49))
    assert kept.num_tokens.tolist() == [2]
    recovered = run(road, target, [[0]], draft, words=accept_words(1, 0.51))
    assert recovered.token_ids.tolist() == [[1, -1]]
    assert recovered.is_bad.tolist() == [False]


def test_a_promise_that_all_are_greedy_changes_no_draft(road: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator).repeat(1, 2)  # ties
    logits[1, 7], logits[2, 9], logits[3], logits[4, :3] = NAN, INF, -INF, -INF
    logits = logits.to(DEVICE)
    sampling = make_sampling(6, temperature=0.0)
    at = torch.full((6,), 3, device=DEVICE)
    with on_road(road):
        short, long = (
            draw_draft(logits, sampling, at, at, 70, draws=draws) for draws in (False, True)
        )
    assert torch.equal(short.token_ids, long.token_ids)


def test_rejection_by_rounding_falls_back_to_the_target(road: str) -> None:
    """Where p = q nothing is left to recover, yet a broken draft id can still be rejected."""
    target = torch.tensor([[-INF, 0.0, 0.0]]).repeat(2, 1)
    draft = target[None, :1].clone()
    verified = run(road, target, [[0]], draft)  # p(0) = q(0) = 0
    assert verified.num_tokens.tolist() == [1]
    assert int(verified.token_ids[0, 0]) in (1, 2)


def test_finite_minimum_masks_are_logits_like_any_other(road: str) -> None:
    lowest = torch.finfo(torch.float32).min
    target = torch.full((2, 3000), lowest)
    target[:, 2999] = 1.0
    assert run(road, target, [[], []]).token_ids.tolist() == [[2999], [2999]]


@pytest.mark.parametrize(
    ("rule", "dtype", "filters"),
    [
        (Rule.TOKEN, torch.float32, {}),
        (Rule.BLOCK, torch.bfloat16, {}),
        (Rule.MATCH, torch.float16, {}),
        (Rule.TOKEN, torch.bfloat16, {"top_p": 0.99}),
    ],
)
def test_no_masked_token_is_drawn_behind_the_good_one(
    rule: Rule, dtype: torch.dtype, filters: dict[str, float], road: str
) -> None:
    """Whole blocks of finfo.min, as models and processors mask, at temperatures down to the least
    that is not greedy. Even the least and the greatest word must choose the good token.
    """
    target = torch.full((4, 1100), torch.finfo(dtype).min, dtype=dtype)
    target[:, 3] = 1.0
    words = torch.zeros(2, 3, 4, dtype=torch.int64)
    words[0, 2] = 2**32 - 1
    for temperature in (1e-5, 0.7):
        verified = run(
            road, target, [[3], [1050]], words=words, rule=rule, temperature=temperature, **filters
        )
        assert not verified.is_bad.any()
        assert verified.token_ids.tolist() == [[3, 3], [3, -1]]


def test_subnormal_logits_and_both_zeros_keep_their_order(road: str) -> None:
    """Zeros tie, whatever their sign; a subnormal logit is no zero."""
    target = torch.tensor([[-0.0, 0.0, -1e-40, 1e-40, 0.0, -1.0]]).repeat(2, 1)
    assert run(road, target, [[], []], temperature=0.0).token_ids.tolist() == [[3], [3]]
    assert run(road, target[:, :3], [[], []], temperature=0.0).token_ids.tolist() == [[0], [0]]
    sampling = make_sampling(2, top_k=2)
    positions = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with on_road(road):
        state = draw_draft(target.to(DEVICE), sampling, positions, positions, 6).state[0]
    assert (float(state[2]), float(state[3])) == (0.0, 0.0)  # the zero of the lowest id


def test_tiny_temperature_is_almost_greedy(road: str) -> None:
    target = torch.tensor([[20.0, 20.5, 19.0]])
    assert run(road, target, [[]], temperature=1e-6).token_ids.tolist() == [[1]]


def test_top_p_of_zero_keeps_the_best_token(road: str) -> None:
    target = torch.tensor([[0.0, 0.1, 0.05]] * 6)
    verified = run(road, target, [[]] * 6, top_p=0.0)
    assert verified.token_ids.flatten().tolist() == [1] * 6


def test_drafts_past_the_count_are_not_read(road: str) -> None:
    target = torch.tensor([[0.0, 5.0]] * 2)
    verified = run(road, target, [[1, 99, -7]], num_drafts=[1], temperature=0.0)
    assert verified.token_ids.tolist() == [[1, 1, -1, -1]]


def test_more_drafts_than_supported_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 32"):
        run("reference", torch.zeros(34, 4), [[0] * 33])


def test_draft_and_recovery_do_not_share_noise(road: str) -> None:
    """Were they shared, the recovered token would follow the rejected one."""
    batch = 4000 if road == "reference" or DEVICE.type == "cuda" else 20
    vocab = 8
    target = torch.zeros(2 * batch, vocab)
    draft = torch.zeros(batch, 1, vocab)
    draft[..., :4] = 3.0
    sampling = make_sampling(batch)
    positions = torch.full((batch,), 5, device=DEVICE)
    one = torch.ones(batch, dtype=torch.int32, device=DEVICE)
    with on_road(road):
        drawn = draw_draft(draft[:, 0].to(DEVICE), sampling, positions, positions, vocab)
        verified = verify(
            target.to(DEVICE), cu_rows_of(one), drawn.token_ids[:, None], one, draft.to(DEVICE),
            drawn.state[:, None].contiguous(), sampling, positions, vocab,
        )  # fmt: skip
    rejected = verified.num_tokens == 1
    recovered = verified.token_ids[rejected, 0]
    assert int(recovered.min()) >= 4  # the residual's support
    if batch > 1000:
        table = torch.zeros(4, 4)
        for x, y in zip(drawn.token_ids[rejected].tolist(), recovered.tolist(), strict=True):
            table[x, y - 4] += 1
        expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
        assert float(((table - expected) ** 2 / expected).sum()) < 30  # chi2, 9 degrees


def test_recovery_does_not_reuse_the_acceptance_draw() -> None:
    """A rejection means a large uniform; were it used again, only high blocks would come."""
    batch, vocab = 400, 2 * BLOCK
    target = torch.zeros(2 * batch, vocab, device=DEVICE)
    target[:, 5] = math.log(vocab - 1)  # the draft, of probability 1/2
    with on_road("reference"):
        one = torch.ones(batch, dtype=torch.int32, device=DEVICE)
        verified = verify(
            target, cu_rows_of(one), torch.full((batch, 1), 5, device=DEVICE), one, None, None,
            make_sampling(batch), torch.full((batch,), 7, device=DEVICE), vocab,
        )  # fmt: skip
    lower = (verified.token_ids[verified.num_tokens == 1, 0] < BLOCK).float().mean()
    assert float(lower) == pytest.approx(0.5, abs=0.1)

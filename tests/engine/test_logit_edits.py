"""Edits of logits under speculation: the output is the target's own, edited token by token."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from target_distribution import greedy, next_logits
from tiny_models import VOCAB

from outrider.engine.api import InvalidRequestError, NewRequest, SamplingParams, ThinkingBudget
from outrider.engine.engine import Engine
from outrider.engine.logit_edits import LogitEdits
from outrider.engine.logit_edits.penalties import Penalties
from outrider.engine.logit_edits.thinking import ThinkingLimit
from outrider.engine.request import Request
from outrider.engine.state.slots import Slots
from outrider.engine.validation import check_request
from outrider.kernels.edits.edit_rows import EditRows

PROMPTS = prompts([3, 21, 9], VOCAB, seed=4)
SPENT = ThinkingBudget(num_tokens=0, open_token_id=1, close_token_id=9, begun=True)


@pytest.fixture(scope="module")
def edits(target: Path) -> dict[str, SamplingParams]:
    """Every edit by name, each one a change to what the prompts are continued with."""
    plain = [greedy(target, prompt, GREEDY) for prompt in PROMPTS]
    pairs = [tuple(output[i : i + 2]) for output in plain for i in (0, 4, 5, 9)]
    each: dict[str, SamplingParams] = {
        "repetition": replace(GREEDY, repetition_penalty=1.4),
        "frequency": replace(GREEDY, frequency_penalty=0.9),
        "presence": replace(GREEDY, presence_penalty=-1.5),
        "bias": replace(GREEDY, logit_bias={plain[0][0]: -9.0, 5: 2.5, 9: 4.0}),
        "allowed": replace(GREEDY, allowed_token_ids=tuple(range(0, VOCAB, 5))),
        "bad_words": replace(GREEDY, bad_words=(*pairs, (plain[1][0],), tuple(plain[2][3:7]))),
        "min_tokens": replace(
            GREEDY, min_tokens=7, stop_token_ids=(plain[0][2], plain[1][1], plain[2][6])
        ),
        "thinking": replace(
            GREEDY,
            thinking=ThinkingBudget(
                num_tokens=3, open_token_id=plain[0][1], close_token_id=11, num_opening=1
            ),
        ),
    }
    each["all"] = replace(
        GREEDY,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        logit_bias=each["bias"].logit_bias,
        allowed_token_ids=tuple(set(range(VOCAB)) - {1, 7}),
        bad_words=each["bad_words"].bad_words,
        min_tokens=7,
        stop_token_ids=each["min_tokens"].stop_token_ids,
        thinking=replace(each["thinking"].thinking, open_token_id=5),
    )
    return each


@pytest.mark.parametrize("is_blind", [False, True])
def test_a_request_is_edited_alone_as_in_company(
    target: Path, draft: Path, edits: dict[str, SamplingParams], is_blind: bool
) -> None:
    """Also where all edits of all rows run, as in graphs, and only tables say who asks for them."""
    each = [replace(params, max_tokens=12) for params in (GREEDY, *edits.values())]
    each += [replace(params, temperature=1.0, seed=i) for i, params in enumerate(each)]
    prompt = PROMPTS[0]
    engine = Engine(engine_config(target, draft, max_num_seqs=1))
    alone = [tokens(run(engine, [prompt], params)[0]) for params in each]
    assert alone[0] == greedy(target, prompt, each[0])
    assert len({tuple(output) for output in alone[: len(edits) + 1]}) >= 6
    # Slots change hands between requests with edits and without, and prefixes are shared.
    engine = Engine(engine_config(target, draft, max_num_seqs=5, max_num_batched_tokens=40))
    engine.worker.edits._is_blind |= is_blind
    for _ in range(2):
        together = run(engine, [prompt] * len(each), each)
        assert [tokens(output) for output in together] == alone
        each.reverse()
        alone.reverse()


def test_match_draws_the_same_edited_tokens_for_any_k(
    target: Path, draft: Path, edits: dict[str, SamplingParams]
) -> None:
    params = replace(edits["all"], temperature=1.0, verification="match", seed=7)
    plain, drafted = (
        [tokens(o) for o in run(Engine(engine_config(target, draft, k=k)), PROMPTS, params)]
        for k in (0, 4)
    )
    assert drafted == plain


def test_preemption_changes_no_edit(
    target: Path, draft: Path, edits: dict[str, SamplingParams]
) -> None:
    truth = [greedy(target, prompt, edits["all"]) for prompt in PROMPTS]
    config = engine_config(target, draft, num_pages=14, prefix_caching=False)
    engine = Engine(replace(config, max_model_len=48))
    assert [tokens(o) for o in run(engine, PROMPTS, edits["all"])] == truth
    assert engine.stats().preemptions > 0


def test_logprobs_are_of_the_logits_as_the_target_gave_them(
    target: Path, draft: Path, edits: dict[str, SamplingParams]
) -> None:
    params = replace(edits["all"], temperature=1.0, logprobs=2)
    for prompt, outputs in zip(
        PROMPTS, run(Engine(engine_config(target, draft)), PROMPTS, params), strict=True
    ):
        ids = tokens(outputs)
        given = [entry for output in outputs for entry in output.logprobs or []]
        for i, (token_id, found) in enumerate(zip(ids, given, strict=True)):
            (row,) = next_logits(target, [prompt + ids[:i]]).log_softmax(-1)
            assert found.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert [token for token, _ in found.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("k", [0, 3])
def test_edits_that_leave_no_token_end_their_own_request_only(
    target: Path, draft: Path, k: int
) -> None:
    each_other = tuple((a, b) for a in (3, 4) for b in (3, 4))
    stuck = replace(GREEDY, allowed_token_ids=(3, 4), bad_words=each_other)
    engine = Engine(engine_config(target, draft, k=k))
    failed, beside = run(engine, PROMPTS[:2], [stuck, GREEDY])
    assert tokens(failed) == greedy(target, PROMPTS[0], replace(stuck, max_tokens=1))
    assert failed[-1].finish_reason == "error"
    assert failed[-1].is_dead_end
    assert tokens(beside) == greedy(target, PROMPTS[1], GREEDY)


def test_min_tokens_holds_eos_back_even_where_it_is_ignored(target: Path, draft: Path) -> None:
    first = greedy(target, PROMPTS[0], GREEDY)[0]
    config = replace(engine_config(target, draft), eos_token_ids=(first,))
    for ignore_eos in (False, True):
        params = replace(GREEDY, min_tokens=2, ignore_eos=ignore_eos)
        output = tokens(run(Engine(config), PROMPTS[:1], params)[0])
        assert first not in output[:2]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": float("nan")}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": float("inf")}),
        ("min_tokens", {"min_tokens": 25}),
        ("min_tokens", {"min_tokens": -1}),
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("logit_bias", {"logit_bias": {1: float("inf")}}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(2000), 1.0)}),
        ("allowed_token_ids", {"allowed_token_ids": (3, VOCAB)}),
        ("bad_words", {"bad_words": ((),)}),
        ("bad_words", {"bad_words": ((1, -1),)}),
        ("bad_words", {"bad_words": ((1,),) * 300}),
        ("bad_words", {"bad_words": ((1,) * 3000,)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        (
            "thinking",
            {"thinking": ThinkingBudget(num_tokens=-1, open_token_id=1, close_token_id=2)},
        ),
        (
            "thinking",
            {"thinking": ThinkingBudget(num_tokens=1, open_token_id=1, close_token_id=VOCAB)},
        ),
        (
            "thinking",
            {"thinking": ThinkingBudget(num_tokens=1, open_token_id=-1, close_token_id=2)},
        ),
        ("allowed_token_ids", {"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))}),
        ("allowed_token_ids", {"allowed_token_ids": (0,), "min_tokens": 1}),
        ("bad_words", {"bad_words": tuple((i,) for i in range(1, VOCAB)), "min_tokens": 1}),
    ],
)
def test_unusable_edits_are_refused_by_name(field: str, change: dict[str, object]) -> None:
    params = replace(GREEDY, **change)  # type: ignore[arg-type]
    new = NewRequest(request_id="bad", prompt_token_ids=[1], params=params)
    vocab_size = 5000 if len(params.logit_bias) > VOCAB else VOCAB
    with pytest.raises(InvalidRequestError, match=f"^{field}"):
        check_request(new, 256, vocab_size, eos_token_ids=(0,))


@pytest.mark.parametrize("bias", [1e30, 3e38])
def test_the_largest_bias_stays_finite_under_the_strongest_penalty(
    bias: float, target: Path
) -> None:
    """Or it is refused. The prompt has the token, whose logit is divided by the penalty."""
    engine = Engine(engine_config(target))
    params = replace(GREEDY, logit_bias={3: bias}, repetition_penalty=1e-6, max_tokens=4)
    try:
        [outputs] = run(engine, [[3]], params)
    except InvalidRequestError:
        assert bias > 1e30
    else:
        assert tokens(outputs) == [3] * 4


def test_rows_have_few_tokens_left_to_count(
    target: Path, draft: Path, edits: dict[str, SamplingParams]
) -> None:
    """Not as many as the answer has by then."""
    engine = Engine(engine_config(target, draft, k=3))
    penalties, limit = (
        next(edit for edit in engine.worker.edits._chain if isinstance(edit, kind))
        for kind in (Penalties, ThinkingLimit)
    )
    run(engine, PROMPTS[:1], edits["all"])
    (num_tokens,) = engine.worker.slots.num_tokens[:-1][engine.worker.slots.num_tokens[:-1] > 0]
    for counted in (penalties._state.num_counted[0], limit._thoughts[0, 3]):
        assert num_tokens - 4 <= counted < num_tokens


def seated(*asked: SamplingParams) -> LogitEdits:
    """Of one slot, which requests of the tokens 3, 4, 4 got one after another."""
    slots = Slots(1, 8, 0, 4, torch.device("cpu"), VOCAB)
    edits = LogitEdits(slots)
    edits._is_blind = True  # as on a GPU
    for params in asked:
        request = Request(NewRequest(request_id="0", prompt_token_ids=[3], params=params))
        request.token_ids += [4, 4]
        request.slot = 0
        slots.fill([request], [request])
        edits.seat(request)
    return edits


@pytest.mark.parametrize(
    "asked",
    [
        replace(GREEDY, repetition_penalty=1.4),
        replace(GREEDY, logit_bias={7: 3.0}),
        replace(GREEDY, allowed_token_ids=(3, 5)),
        replace(GREEDY, bad_words=((4, 6), (8,))),
        replace(GREEDY, thinking=SPENT),
    ],
)
def test_a_slot_forgets_what_its_last_request_asked_for(asked: SamplingParams) -> None:
    logits = torch.randn(1, VOCAB)
    at = EditRows(*(torch.tensor([n]) for n in (0, 0, 3)))
    assert torch.equal(seated(asked, GREEDY).apply(logits, at), logits)
    assert not torch.equal(seated(GREEDY, asked).apply(logits, at), logits)


def test_bfloat16_rounds_no_penalty_away() -> None:
    edits = seated(replace(GREEDY, presence_penalty=0.05))
    assert edits.asked_by(np.array([0, 1])).tolist() == [True, False]
    logits = torch.full((3, VOCAB), 40.0, dtype=torch.bfloat16)
    row, slot, position = (torch.tensor([n]) for n in (2, 0, 3))
    found = edits.apply(logits, EditRows(row, slot, position))  # only the last of three rows
    assert found.shape == (1, VOCAB)
    assert found[0, 3:5].tolist() == pytest.approx([40, 39.95])
    assert bool((logits == 40).all())

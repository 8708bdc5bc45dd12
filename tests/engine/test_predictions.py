"""What a client predicts of an answer is drafted, and changes nothing of it but its speed."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from distributions import bound, chi_squared, total_variation
from engines import GREEDY, engine_config, prompts, run, sampling_config, tokens
from heads import save_tiny_head
from target_distribution import joint, sample
from tiny_models import VOCAB, Quick, Tiny

from outrider.engine.api import InvalidRequestError, NewRequest, RequestOutput, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.plan import Plan
from outrider.engine.proposers import predictions
from outrider.engine.proposers.lookup import Lookup
from outrider.engine.proposers.predictions import Prediction
from outrider.engine.request import Request
from outrider.kernels.verify.sampling import STATE_LOG_Z

K = 3
PROMPT = prompts([9], VOCAB)[0]


class Predicting:
    """A request with a prediction: what is drafted as its answer grows."""

    def __init__(self, predicted: list[int]) -> None:
        self._request = Request(
            NewRequest(
                request_id="0",
                prompt_token_ids=[1, 2, 3],
                params=GREEDY,
                predicted_token_ids=predicted,
            )
        )
        self._source = Lookup(
            "prediction",
            Prediction.of,
            None,  # type: ignore[arg-type]
            most_pause=0,
        )

    def after(
        self, *answer: int, k: int, in_flight: list[int] | Literal["drawn"] | None = None
    ) -> list[int] | Literal["later"] | None:
        """`in_flight` are the drafts of the step in flight, if there is one."""
        self._request.token_ids = [1, 2, 3, *answer]
        drawn = in_flight == "drawn"
        self._request.num_drafts_in_flight = None if in_flight is None else len(in_flight)
        self._request.drafts_in_flight = None if drawn else list(in_flight or [])
        wish = self._source.wish(self._request)
        if wish is not None and wish.waits:
            return "later"
        return None if wish is None else wish.drafts[:k]


def test_a_prediction_is_drafted_from_its_beginning() -> None:
    assert Predicting([10, 11, 12, 13]).after(k=3) == [10, 11, 12]


def test_it_is_followed_as_far_as_it_goes() -> None:
    text = Predicting([10, 11, 12, 13])
    assert text.after(10, 11, 12, k=3) == [13]
    assert text.after(10, 11, 12, 13, k=3) is None


def test_two_tokens_lead_back_to_it() -> None:
    text = Predicting([10, 11, 12, 13, 14, 15])
    assert text.after(10, 99, k=3) is None
    assert text.after(10, 99, 12, k=3) is None
    assert text.after(10, 99, 12, 13, k=3) == [14, 15]


def test_of_several_places_the_next_one_is_taken() -> None:
    text = Predicting([7, 8, 20, 7, 8, 21, 7, 8, 22])
    assert text.after(99, 7, 8, k=1) == [20]
    assert text.after(99, 7, 8, 20, 98, 7, 8, k=1) == [21]
    assert text.after(99, 7, 8, 20, 98, 7, 8, 97, 7, 8, k=1) == [22]
    assert text.after(99, 7, 8, 20, 98, 7, 8, 97, 7, 8, 96, 7, 8, k=1) == [20]  # again


def test_the_longest_piece_says_which_place_it_is() -> None:
    assert Predicting([7, 8, 20, 6, 7, 8, 21]).after(99, 6, 7, 8, k=1) == [21]


def test_an_answer_that_goes_on_as_predicted_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host does that for every such sequence of every step."""
    num_searches, search = 0, predictions.longest_suffix

    def counted(*args: Any) -> Any:
        nonlocal num_searches
        num_searches += 1
        return search(*args)

    monkeypatch.setattr(predictions, "longest_suffix", counted)
    foretold = [*range(10, 90)]
    text, answer = Predicting(foretold), [10]
    assert text.after(10, k=1) == [11]
    for come in (1, 5, 33, 33):
        answer += foretold[len(answer) : len(answer) + come]
        assert text.after(*answer, k=2) == foretold[len(answer) : len(answer) + 2]
    assert num_searches == 1
    assert text.after(*answer, 99, k=2) is None
    assert text.after(*answer, 99, 30, 31, k=2) == [32, 33]
    assert num_searches == 3


def test_a_step_in_flight_is_taken_to_bring_what_is_predicted() -> None:
    text = Predicting([*range(10, 30)])
    assert text.after(k=3, in_flight=[]) == [11, 12, 13]  # 10 is on its way
    assert text.after(10, k=3, in_flight=[11, 12, 13]) == [15, 16, 17]  # and so are 11 to 14
    assert text.after(*range(10, 15), k=3, in_flight=[15, 16, 17]) == [19, 20, 21]


def test_what_it_does_not_know_is_left_to_others() -> None:
    text = Predicting([*range(10, 30)])
    assert text.after(10, 11, 99, k=3, in_flight=[15, 16, 17]) is None
    assert text.after(10, 11, 99, 98, k=3, in_flight=[]) is None


def test_drafts_predicted_elsewhere_are_taken_to_fall() -> None:
    text = Predicting([*range(10, 30)])
    # 20 was drawn in place of 12, and follows 19: so what is in flight brings 21 alone.
    assert text.after(10, 11, 19, 20, k=2, in_flight=[14, 15]) == [22, 23]


def test_drafts_that_another_source_found_may_be_the_predicted_ones() -> None:
    text = Predicting([*range(10, 30)])
    assert text.after(10, 11, k=3, in_flight=[12, 13]) == [15, 16, 17]
    assert text.after(10, 11, k=3, in_flight=[12, 99]) == [13, 14, 15]


def test_behind_drafts_of_a_model_it_can_only_follow_a_step_later() -> None:
    text = Predicting([*range(10, 30)])
    assert text.after(99, 98, k=3, in_flight="drawn") is None
    assert text.after(99, 98, 14, 15, k=3, in_flight="drawn") == "later"
    assert text.after(99, 98, 14, 15, 16, 17, 18, k=3, in_flight=[]) == [20, 21, 22]


def drafted(outputs: list[RequestOutput]) -> list[tuple[bool, int, int]]:
    """Of each step: whether its drafts were predicted, how many they were, how many accepted."""
    steps, last = [], (0, 0)
    for output in outputs:
        now = output.num_draft_tokens, output.num_accepted_tokens
        steps.append((output.source == "prediction", now[0] - last[0], now[1] - last[1]))
        last = now
    return steps


@pytest.fixture
def proposers(tiny_model: Tiny, tmp_path: Path) -> dict[str, tuple[Path, Path | None, str]]:
    """Target, draft and the proposer's name."""
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    return {
        "draft_model": (target, draft, "draft_model"),
        "head": (target, save_tiny_head(tmp_path, target, boundaries=(0, 1, 2)), "draft_model"),
        "suffix": (target, None, "suffix"),
    }


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("proposer", ["draft_model", "head", "suffix"])
def test_a_right_prediction_is_accepted_whole(
    proposers: dict[str, tuple[Path, Path | None, str]], proposer: str, lag: int
) -> None:
    target, draft, name = proposers[proposer]
    engine = Engine(engine_config(target, draft, proposer=name, k=K))
    engine.scheduler.lag = lag
    [plain] = run(engine, [PROMPT], replace(GREEDY, num_speculative_tokens=0))
    [outputs] = run(engine, [PROMPT], GREEDY, [tokens(plain)])
    assert tokens(outputs) == tokens(plain)
    steps = drafted(outputs)
    assert all(accepted == made for is_predicted, made, accepted in steps if is_predicted)
    # One token comes with the prompt, if the first step drafts nothing; then K + 1 a step.
    assert sum(made for is_predicted, made, _ in steps if is_predicted) >= 24 * K // (K + 1) - K
    assert len(steps) <= 24 // (K + 1) + 2


@pytest.mark.parametrize("lag", [0, 1])
def test_the_draft_model_goes_on_behind_a_prediction(tiny_model: Tiny, lag: int) -> None:
    """It has not computed what was predicted, and reads it before it drafts: the target's own
    drafts are all accepted.
    """
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, target, k=K))
    engine.scheduler.lag = lag
    [plain] = run(engine, [PROMPT], replace(GREEDY, num_speculative_tokens=0))
    truth = tokens(plain)
    wrong = [(token + 1) % VOCAB for token in truth[10:14]]
    [outputs] = run(engine, [PROMPT], GREEDY, [truth[:10] + wrong])
    assert tokens(outputs) == truth
    steps = drafted(outputs)
    assert {is_predicted for is_predicted, made, _ in steps if made} == {True, False}
    assert all(accepted == made for is_predicted, made, accepted in steps if not is_predicted)
    assert any(accepted < made for _, made, accepted in steps)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_prediction_teaches_nothing_of_the_models_drafts(
    tiny_model: Tiny, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model("llama", seed=0)
    draft = tiny_model("llama", seed=0, num_hidden_layers=1)
    engine = Engine(engine_config(target, draft, k=K, adaptive=True))
    engine.scheduler.lag = lag
    [plain] = run(engine, [PROMPT], replace(GREEDY, num_speculative_tokens=0))
    adaptive, seen = engine.sequences.adaptive, []
    assert adaptive is not None
    monkeypatch.setattr(adaptive, "choose", lambda _, ratios, *args, **options: [0] * len(ratios))
    monkeypatch.setattr(adaptive, "is_measuring", False)
    monkeypatch.setattr(adaptive, "observe", lambda *args, **options: seen.append(args))
    params = replace(GREEDY, num_speculative_tokens=K)
    [outputs] = run(engine, [PROMPT], params, [tokens(plain)])
    assert any(each.source == "prediction" for each in outputs)
    assert all(not any(wanted) for _, wanted, *_ in seen)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("proposer", ["draft_model", "head", "suffix"])
def test_nobody_else_is_answered_differently(
    proposers: dict[str, tuple[Path, Path | None, str]], proposer: str, lag: int
) -> None:
    target, draft, name = proposers[proposer]
    engine = Engine(engine_config(target, draft, proposer=name, k=K, num_pages=40))
    engine.scheduler.lag = lag
    texts = prompts([7, 20, 3, 11], VOCAB)
    match = SamplingParams(max_tokens=24, verification="match")
    params = [GREEDY, replace(match, seed=1), replace(match, seed=2), GREEDY]
    plain = [
        tokens(each)
        for each in run(engine, texts, [replace(p, num_speculative_tokens=0) for p in params])
    ]
    predicted = [plain[0], [], plain[2][:9] + plain[0] + plain[2][9:], []]
    outputs = run(engine, texts, params, predicted)
    assert [tokens(each) for each in outputs] == plain
    assert all(any(o.source == "prediction" for o in outputs[i]) == (i in (0, 2)) for i in range(4))


@pytest.mark.parametrize(
    ("rule", "proposer", "lag", "k"),
    [
        ("token", "draft_model", 1, 3),
        ("block", "draft_model", 0, 3),
        ("block", "head", 1, 3),
        # More drafts are looked up than distributions are kept for.
        ("token", "draft_model", 0, 1),
        ("block", "head", 1, 1),
    ],
)
def test_the_joint_is_the_targets_if_half_of_all_requests_predict(
    rule: str, proposer: str, lag: int, k: int, quick_model: Quick, tmp_path: Path
) -> None:
    if proposer == "head":
        target = quick_model(3, 2)
        options = {"boundaries": (0, 1, 2), "draft_vocab": 3, "scale": 0.2}
        draft = save_tiny_head(tmp_path, target, **options)
    else:
        target, draft = quick_model(3), quick_model(4)
    config = sampling_config(target, draft, "draft_model")
    speculation = replace(config.speculation, num_speculative_tokens=k)
    engine = Engine(replace(config, speculation=speculation))
    engine.scheduler.lag = lag
    params = SamplingParams(max_tokens=4, verification=rule)  # type: ignore[arg-type]
    truth = joint(target, [2, 0, 3], params)
    predicted = ([], [1, 3, 0, 0, 2, 1, 1, 2, 2, 3, 3, 1])
    counts = sample(engine, [2, 0, 3], params, max_k=3, n=2400, predicted=predicted)
    assert total_variation(truth, counts) < bound(len(truth), 2400)
    assert chi_squared(truth, counts) < 1


def test_predicted_drafts_are_not_verified_as_drawn_before(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a slot that still holds what a sequence before drew its drafts from."""
    target, draft = tiny_model("llama", seed=3), tiny_model("llama", seed=4)
    engine = Engine(engine_config(target, draft, k=K, max_num_seqs=1))
    params = SamplingParams(max_tokens=9, seed=1)
    run(engine, [PROMPT], params)
    draws = engine.worker.proposer.draws
    assert draws is not None
    log_z = draws.distributions.state[..., STATE_LOG_Z]  # [num_slots, k]
    assert log_z[0].isfinite().any()
    score, marked = engine.worker.scorer.score, list[bool]()

    def seen(plan: Plan) -> object:
        for scheduled in plan.scheduled:
            if scheduled.source == "prediction":
                marked.append(bool(log_z[scheduled.slot].isnan().all()))
        return score(plan)

    monkeypatch.setattr(engine.worker.scorer, "score", seen)
    run(engine, [PROMPT], params, [[5, 6, 7, 8, 9, 10]])
    assert marked
    assert all(marked)


def test_an_unknown_token_is_refused(tiny_model: Tiny) -> None:
    engine = Engine(engine_config(tiny_model("llama", seed=0), proposer="suffix", k=K))
    with pytest.raises(InvalidRequestError, match="prediction: token ids must lie in"):
        run(engine, [PROMPT], GREEDY, [[VOCAB]])

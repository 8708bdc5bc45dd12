"""From a request's fields to what the engine is given."""

import pytest
from tokenizers_for_tests import byte_fallback_tokenizer

from outrider.engine.api import MAX_REPETITION_PENALTY, ProcessorChoice, SamplingParams
from outrider.server.api.asked import Asked
from outrider.server.api.protocol import CompletionRequest
from outrider.server.api.sampling import bad_word_ids, request_seed, sample_seed, sampling_params
from outrider.server.text.tokenizer import Tokenizer


def params_of(**fields: object) -> SamplingParams:
    request = CompletionRequest.model_validate({"prompt": "x"} | fields)
    asked = Asked(
        fields=request,
        prompts=[[1]],
        param="prompt",
        max_tokens=1,
        logprobs=None,
        prompt_logprobs=(),
        salt="",
    )
    return sampling_params(asked, seed=0, bad_words=())


def test_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert params_of(temperature=1e-300) == params_of(temperature=0)
    assert params_of(temperature=1e-3) != params_of(temperature=0)


@pytest.mark.parametrize("top_p", [0, 1e-300])
def test_vanishing_top_p_leaves_the_best_token(top_p: float) -> None:
    assert 0 < params_of(top_p=top_p).top_p < 1e-6


def test_biases_have_integer_keys_and_openais_range() -> None:
    params = params_of(logit_bias={"5": 1, "07": -1e9, "9": 200.5})
    assert params.logit_bias == {5: 1.0, 7: -100.0, 9: 100.0}


def test_processors_are_named_with_arguments_or_without() -> None:
    params = params_of(logits_processors=["one", {"name": "two", "args": {"n": 2}}])
    assert params.logits_processors == (ProcessorChoice("one"), ProcessorChoice("two", {"n": 2}))


def test_repetition_penalty_stays_where_logits_stay_finite() -> None:
    assert params_of(repetition_penalty=1e-300).repetition_penalty == 1 / MAX_REPETITION_PENALTY
    assert params_of(repetition_penalty=1e300).repetition_penalty == MAX_REPETITION_PENALTY


def test_bad_words_are_banned_at_the_start_of_a_text_and_behind_a_space(
    tokenizer: Tokenizer,
) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert len(ids(" Hello")) == 1 < len(ids("Hello"))
    assert bad_word_ids(["Hello", " Hello"], tokenizer) == (ids("Hello"), ids(" Hello"))
    assert ids(" ZQ") == (*ids(" "), *ids("ZQ"))
    assert bad_word_ids(["ZQ"], tokenizer) == (ids("ZQ"),)


@pytest.mark.parametrize("blank", ["\n", " ", " \n"])
def test_blanks_can_be_bad_words(tokenizer: Tokenizer, blank: str) -> None:
    ids = tuple(tokenizer.encode(blank, add_special_tokens=False))
    assert bad_word_ids([blank], tokenizer) == (ids,)


def test_bad_word_of_a_tokenizer_that_adds_the_space_itself_is_one_sequence() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.backend.token_to_id("▁Hello")
    assert bad_word_ids(["Hello"], tokenizer) == ((ids,),)


def test_seeds_of_samples_do_not_meet() -> None:
    seeds = {sample_seed(seed, sample) for seed in range(100) for sample in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_first_sample_has_the_requests_own_seed() -> None:
    assert sample_seed(5, 0) == 5
    assert request_seed(-1) == 2**64 - 1

"""Numbers that float32 cannot take are refused, or mean what they come to."""

from dataclasses import replace

import pytest

from outrider.engine.api import MAX_K, InvalidRequestError, NewRequest, SamplingParams
from outrider.engine.validation import check_request
from outrider.kernels.verify.sampling import MAX_DRAFTS

PLAIN = SamplingParams(max_tokens=4)


def check(params: SamplingParams) -> None:
    check_request(NewRequest(request_id="r", prompt_token_ids=[1], params=params), 100, 50)


@pytest.mark.parametrize("k", [-1, MAX_K + 1, 50])
def test_a_k_that_no_step_can_have_is_refused(k: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"num_speculative_tokens: {k} .* be 0 to 32"):
        check(replace(PLAIN, num_speculative_tokens=k))
    check(replace(PLAIN, num_speculative_tokens=MAX_K))
    assert MAX_K == MAX_DRAFTS


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-39, 9.9e-6])
def test_a_temperature_below_the_least_is_greedy(temperature: float) -> None:
    params = SamplingParams(max_tokens=4, temperature=temperature, top_p=0.9)
    assert params == SamplingParams(max_tokens=4, temperature=0.0, top_p=0.9)
    assert replace(PLAIN, temperature=temperature).temperature == 0.0
    assert not params.is_filtered
    assert SamplingParams(max_tokens=4, temperature=1e-5).temperature == 1e-5


@pytest.mark.parametrize("value", [-1e-30, 3.5e38, 1e300, float("inf"), float("nan")])
def test_a_temperature_that_float32_cannot_hold_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"temperature: .* must be 0 to 3\.4"):
        check(replace(PLAIN, temperature=value))


@pytest.mark.parametrize("value", [-3e38, 1e39, 1e300, float("inf"), float("nan")])
def test_a_bias_that_float32_cannot_hold_with_penalties_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"logit_bias: .* must be -1e\+30 to 1e\+30"):
        check(replace(PLAIN, logit_bias={3: value}))
    check(replace(PLAIN, logit_bias={3: 1e30, 4: -1e30}, temperature=1e30))

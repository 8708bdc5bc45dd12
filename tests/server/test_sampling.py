"""From a request's fields to what the engine is told."""

import pytest

from outrider.server.protocol import CompletionRequest
from outrider.server.sampling import request_seed, sample_seed, sampling_params


def params_of(**fields: object) -> object:
    request = CompletionRequest.model_validate({"prompt": "x"} | fields)
    return sampling_params(request, max_tokens=1, logprobs=None, seed=0)


def test_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert params_of(temperature=1e-300) == params_of(temperature=0)
    assert params_of(temperature=1e-3) != params_of(temperature=0)


@pytest.mark.parametrize("top_p", [0, 1e-300])
def test_vanishing_top_p_leaves_the_best_token(top_p: float) -> None:
    assert 0 < params_of(top_p=top_p).top_p < 1e-6  # type: ignore[attr-defined]


def test_seeds_of_samples_do_not_meet() -> None:
    seeds = {sample_seed(seed, sample) for seed in range(100) for sample in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_first_sample_has_the_requests_own_seed() -> None:
    assert sample_seed(5, 0) == 5
    assert request_seed(-1) == 2**64 - 1

"""What the engine refuses before anything is allocated. The loop never meets a bad request."""

import math

from outrider.engine.api import InvalidRequestError, NewRequest

MAX_LOGPROBS = 128


def check_request(new: NewRequest, max_model_len: int, vocab_size: int) -> None:
    """Raise InvalidRequestError naming the field, what was given and what is allowed."""
    prompt, params = new.prompt_token_ids, new.params
    if not prompt:
        raise InvalidRequestError("prompt: it is empty; at least one token is needed")
    if len(prompt) >= max_model_len:
        raise InvalidRequestError(
            f"prompt: {len(prompt)} tokens leave no room to decode; "
            f"the context holds {max_model_len} tokens in all"
        )
    if not all(0 <= token_id < vocab_size for token_id in prompt):
        raise InvalidRequestError(f"prompt: token ids must lie in 0..{vocab_size - 1}")
    least = 0 if params.prompt_logprobs is not None else 1
    _check("max_tokens", params.max_tokens, params.max_tokens >= least, f"at least {least}")
    _check(
        "temperature",
        params.temperature,
        math.isfinite(params.temperature) and params.temperature >= 0,
        "finite and at least 0",
    )
    _check("top_k", params.top_k, 0 <= params.top_k < 2**31, "0 (off) or a positive number")
    _check("top_p", params.top_p, 0 < params.top_p <= 1, "above 0, at most 1")
    _check("min_p", params.min_p, 0 <= params.min_p <= 1, "0 to 1")
    _check("seed", params.seed, 0 <= params.seed < 2**64, "an unsigned 64-bit number")
    for name in ("logprobs", "prompt_logprobs"):
        num_top = getattr(params, name)
        if num_top is not None:
            _check(name, num_top, 0 <= num_top <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
    if params.num_speculative_tokens is not None:
        k = params.num_speculative_tokens
        _check("num_speculative_tokens", k, k >= 0, "at least 0")


def _check(name: str, given: float, ok: bool, allowed: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name}: {given} is out of range; it must be {allowed}")

"""Refuses bad requests before anything is allocated, so that the loop never meets one."""

from collections.abc import Iterable, Sequence

from .api import (
    MAX_K,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_TOP_K,
    InvalidRequestError,
    NewRequest,
    SamplingParams,
)
from .logit_edits import bad_words, token_bias

_MAX_FLOAT32 = 3.4028234e38  # slots hold float32
_MAX_BIAS = 1e30  # a penalty may make it MAX_REPETITION_PENALTY times as large


def check_request(
    new: NewRequest, max_model_len: int, vocab_size: int, eos_token_ids: tuple[int, ...] = ()
) -> None:
    """Raise InvalidRequestError naming the field, what was given and what is allowed."""
    prompt, params = new.prompt_token_ids, new.params
    if not prompt:
        raise InvalidRequestError("prompt: it is empty; at least one token is needed")
    if len(prompt) + min(1, params.max_tokens) > max_model_len:
        raise InvalidRequestError(
            f"prompt: {len(prompt)} tokens do not fit: the context holds {max_model_len} tokens in "
            "all, of which one is left for the answer unless max_tokens is 0"
        )
    _check_ids("prompt", prompt, vocab_size)
    _check_ids("prediction", new.predicted_token_ids, vocab_size)
    _check("max_tokens", params.max_tokens, params.max_tokens >= 0, "at least 0")
    in_range = 0 <= params.temperature <= _MAX_FLOAT32
    _check("temperature", params.temperature, in_range, f"0 to {_MAX_FLOAT32:g}")
    _check("top_k", params.top_k, 0 <= params.top_k <= MAX_TOP_K, "0 (off) or a positive number")
    _check("top_p", params.top_p, 0 < params.top_p <= 1, "above 0, at most 1")
    _check("min_p", params.min_p, 0 <= params.min_p <= 1, "0 to 1")
    _check("seed", params.seed, 0 <= params.seed < 2**64, "an unsigned 64-bit number")
    for name in ("logprobs", "prompt_logprobs"):
        num_top = getattr(params, name)
        if num_top is not None:
            _check(name, num_top, 0 <= num_top <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
    named = params.logprob_token_ids
    _check_ids("logprob_token_ids", named, vocab_size)
    is_short = len(named) <= MAX_LOGPROBS
    _check("logprob_token_ids", len(named), is_short, f"at most {MAX_LOGPROBS} ids")
    if named and params.logprobs is None:
        raise InvalidRequestError("logprob_token_ids: they need logprobs")
    if params.num_speculative_tokens is not None:
        k = params.num_speculative_tokens
        _check("num_speculative_tokens", k, 0 <= k <= MAX_K, f"0 to {MAX_K}")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_edits(params, vocab_size, frozenset((*params.stop_token_ids, *eos_token_ids)))


def check_sources(named: Sequence[str] | None, there: Sequence[str]) -> None:
    """Raise InvalidRequestError if a request names a source of drafts that is not there."""
    absent = [name for name in named or () if name not in there]
    if absent:
        have = f"this server has {', '.join(there)}" if there else "this server has none"
        raise InvalidRequestError(f"speculation.sources: {absent[0]!r} is no source here; {have}")


def _check_edits(params: SamplingParams, vocab_size: int, ends: frozenset[int]) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        _check(name, value := getattr(params, name), -2 <= value <= 2, "-2 to 2")
    lowest, highest = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    repetition = params.repetition_penalty
    allowed = f"{lowest:g} to {highest:g}"
    _check("repetition_penalty", repetition, lowest <= repetition <= highest, allowed)
    in_range = 0 <= params.min_tokens <= params.max_tokens
    _check("min_tokens", params.min_tokens, in_range, f"0 to max_tokens ({params.max_tokens})")

    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        in_range = abs(bias) <= _MAX_BIAS
        _check("logit_bias", bias, in_range, f"-{_MAX_BIAS:g} to {_MAX_BIAS:g}")
    num_entries, most = len(params.logit_bias) + len(ends), token_bias.MAX_ENTRIES
    _check("logit_bias", num_entries, num_entries <= most, f"{most} tokens at most, eos among them")

    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("bad_words", (t for word in params.bad_words for t in word), vocab_size)
    num_words, num_tokens = len(params.bad_words), sum(map(len, params.bad_words))
    if not all(params.bad_words):
        raise InvalidRequestError("bad_words: a word is empty; each needs a token at least")
    most = bad_words.MAX_WORDS
    _check("bad_words", num_words, num_words <= most, f"at most {most} words")
    most = bad_words.MAX_TOKENS
    allowed = f"at most {most} tokens in all words together"
    _check("bad_words", num_tokens, num_tokens <= most, allowed)

    if (thinking := params.thinking) is not None:
        _check("thinking", thinking.num_tokens, thinking.num_tokens >= 0, "at least 0 tokens")
        _check_ids("thinking", (thinking.open_token_id, thinking.close_token_id), vocab_size)
        opening = thinking.num_opening
        _check("thinking", opening, 0 <= opening < 2**31, "a few opening tokens")

    banned = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens > 0:
        banned |= ends
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise InvalidRequestError(
            "allowed_token_ids: bad_words and min_tokens ban every one of them; allow another"
        )
    if len(banned) == vocab_size:
        raise InvalidRequestError("bad_words: with min_tokens they ban the whole vocabulary")


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise InvalidRequestError(f"{name}: token ids must lie in 0..{vocab_size - 1}")


def _check(name: str, given: float, ok: bool, allowed: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name}: {given} is out of range; it must be {allowed}")

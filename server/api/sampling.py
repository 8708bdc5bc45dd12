"""Turns a request's fields into the engine's sampling parameters."""

import secrets

from outrider.engine.api import MAX_REPETITION_PENALTY, MAX_TOP_K, ProcessorChoice, SamplingParams

from ..base.errors import cut, invalid_value
from ..text.tokenizer import Tokenizer
from .asked import Asked

_MASK = 2**64 - 1

# A smaller top_p still means the best token alone, and no vocabulary is so large and flat that
# this one lets in a second.
MIN_TOP_P = 1e-7
MAX_BIAS = 100.0  # OpenAI's range; enough to ban or force a token


def sample_seed(seed: int, sample: int) -> int:
    """The 64-bit seed of one of n samples. The first sample has the request's own seed.

    The others get SplitMix64's output function (Steele et al., OOPSLA 2014) of both numbers.
    """
    return seed if sample == 0 else _mix(_mix(seed) ^ sample)


def request_seed(seed: int | None) -> int:
    """A request's seed as an unsigned number; a random one if it has none."""
    return secrets.randbits(64) if seed is None else seed & _MASK


def sampling_params(
    asked: Asked, *, seed: int, bad_words: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    """Those of a sample with this seed; `bad_words` are in token ids."""
    fields, speculation = asked.fields, asked.fields.speculation
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=fields.temperature,
        top_k=min(max(fields.top_k, 0), MAX_TOP_K),  # the most keeps every token, too
        top_p=max(fields.top_p, MIN_TOP_P),
        min_p=fields.min_p,
        seed=seed,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=_clamp(
            fields.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
        logit_bias={
            token_id: _clamp(bias, -MAX_BIAS, MAX_BIAS)
            for token_id, bias in fields.logit_bias.items()
        },
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        bad_words=bad_words,
        min_tokens=fields.min_tokens,
        logits_processors=tuple(
            ProcessorChoice(processor.name, processor.args)
            for processor in fields.logits_processors
        ),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        logprobs=asked.logprobs,
        logprob_token_ids=tuple(fields.logprob_token_ids or ()),
        prompt_logprobs=max(
            (num for num in asked.prompt_logprobs if num is not None), default=None
        ),
        num_speculative_tokens=speculation.num_speculative_tokens if speculation.enabled else 0,
        verification=speculation.verification or ("match" if fields.seed is not None else None),
        grammar=asked.grammar,
    )


def bad_word_ids(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, at the start of a text and after a space; blanks as they are.

    vLLM uses the second form only if it is as long as the first. That lets a word through which is
    one token after a space, but several otherwise. Raises APIError for a word without tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        said = word.lstrip()
        bare, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for text in (said or word, f" {said}")
        )
        if not bare:
            raise invalid_value(
                "bad_words",
                f"The bad word {cut(word)!r} has no tokens.",
                reason="a bad word has no tokens",
            )
        sequences[bare] = None
        if said and spaced[-len(bare) :] != bare:  # otherwise the first form bans it already
            sequences[spaced] = None
    return tuple(sequences)


def _clamp(value: float, lowest: float, highest: float) -> float:
    return min(max(value, lowest), highest)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

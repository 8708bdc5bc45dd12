"""The most memory that a request may need, computed from its fields before anything runs."""

import json
from collections.abc import Sequence

from ..base.errors import APIError, invalid_value
from .asked import Asked
from .protocol import ChoiceFields

# Bytes in the HTTP process and the engine together, measured and rounded up:
TOKEN_BYTES = 256  # a generated token, with its text
PROMPT_TOKEN_BYTES = 64  # a token of the prompt, or an id or bias in a list of the request
ECHOED_TOKEN_BYTES = 256
ALTERNATIVE_BYTES = 512  # an id and its logprob, in the engine's output and as JSON
LOGPROB_BYTES = 1024  # a token's own logprob, and the list of its alternatives
TRACED_TOKEN_BYTES = 1024  # a token or a draft in a trace, with its text
ENCODING_BYTES = 256  # a character while its text is encoded: it may be a token
ARGUMENT_BYTES = 32  # one byte of JSON in a logits processor's arguments


def check_bytes(max_bytes: int, param: str, num_bytes: int) -> None:
    """Raise APIError if what a request does with one field may need more than `max_bytes`."""
    if num_bytes > max_bytes:
        raise invalid_value(
            param,
            f"This request may need {num_bytes:,} bytes of memory; this server gives one at most "
            f"{max_bytes:,} (server.max_answer_bytes). Shorten {param}.",
        )


def check_answer_size(
    max_bytes: int, asked: Asked, *, bad_words: Sequence[Sequence[int]], max_drafts: int
) -> None:
    """Raise APIError if the sequences of this request may together need more than `max_bytes`.

    `bad_words` are in token ids; `max_drafts` is per step.
    """
    fields, max_tokens = asked.fields, asked.max_tokens
    prompt_tokens = fields.num_samples * sum(map(len, asked.prompts))
    num_sequences = fields.num_samples * len(asked.prompts)
    listed_bytes = sum(map(_logprobs_bytes, asked.prompt_logprobs))
    logprobs = len(fields.logprob_token_ids or ()) or asked.logprobs
    echo = bool(getattr(fields, "echo", False))
    num_ids = sum(map(len, (fields.allowed_token_ids or (), fields.logit_bias, *bad_words)))
    arguments = sum(len(json.dumps(each.args)) for each in fields.logits_processors)
    traced = fields.speculation.trace * (1 + max_drafts)  # tokens and drafts, of each token
    parts = {
        "prompt_logprobs": prompt_tokens * listed_bytes,
        "prompt": prompt_tokens * (PROMPT_TOKEN_BYTES + echo * ECHOED_TOKEN_BYTES),
        "prediction": num_sequences * len(asked.predicted) * PROMPT_TOKEN_BYTES,
        "max_tokens": num_sequences * max_tokens * TOKEN_BYTES,
        "logprobs": num_sequences * max_tokens * _logprobs_bytes(logprobs),
        "speculation.trace": num_sequences * max_tokens * traced * TRACED_TOKEN_BYTES,
        "allowed_token_ids": num_sequences * num_ids * PROMPT_TOKEN_BYTES,
        "logits_processors": num_sequences * arguments * ARGUMENT_BYTES,
    }
    needed = sum(parts.values())
    if needed > max_bytes:
        raise _too_large(fields, parts, needed=needed, allowed=max_bytes)


def _logprobs_bytes(num_alternatives: int | None) -> int:
    """Bytes of the logprobs of one token; None: none are reported."""
    return 0 if num_alternatives is None else LOGPROB_BYTES + num_alternatives * ALTERNATIVE_BYTES


def _too_large(
    fields: ChoiceFields, parts: dict[str, int], *, needed: int, allowed: int
) -> APIError:
    large = [name for name, size in parts.items() if size > needed / 10]
    if {"logprobs", "speculation.trace"} & set(large):
        large.append("max_tokens")
    known_as: dict[str, str] = {}
    if "messages" in type(fields).model_fields:
        known_as = {"prompt": "messages", "max_tokens": "max_completion_tokens"}
        known_as["logprobs"] = "top_logprobs"
    elif fields.prompt_logprobs is None:
        known_as = {"prompt_logprobs": "logprobs"}  # of an echo
    names = [known_as.get(name, name) for name in large]
    if fields.num_samples > 1:
        names.insert(0, "n" if fields.num_samples == fields.n else "best_of")
    names = list(dict.fromkeys(names))
    return invalid_value(
        names[0],
        f"The answer may need {needed:,} bytes of memory; this server gives a request at most "
        f"{allowed:,} (server.max_answer_bytes). Lower {', '.join(names)}.",
    )

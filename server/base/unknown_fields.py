"""What happens to fields that are not served: refused, ignored, or reported as unknown."""

import logging
from collections.abc import Mapping
from itertools import islice
from typing import ClassVar

from starlette.requests import Request

from .errors import APIError, cut, unsupported
from .fields import APIRequest, UnknownField, did_you_mean

log = logging.getLogger("outrider.server.requests")

MAX_NAMED = 8  # a body may hold a million

# Known parameters that are not served yet, with the values that have no effect.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "stop_regex": (),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# Samplers of other servers, each with the value that turns it off, and what comes nearest here.
OTHER_SAMPLERS: dict[str, tuple[object, str]] = {
    "do_sample": (True, "temperature: 0"),
    "dry_multiplier": (0, "frequency_penalty or repetition_penalty"),
    "dynatemp_range": (0, "temperature"),
    "epsilon_cutoff": (0, "min_p"),
    "eta_cutoff": (0, "min_p"),
    "mirostat": (0, "temperature and top_p"),
    "mirostat_mode": (0, "temperature and top_p"),
    "no_repeat_ngram_size": (0, "frequency_penalty or repetition_penalty"),
    "repeat_last_n": (-1, "repetition_penalty, which reads the prompt and the whole answer"),
    "smoothing_factor": (0, "temperature"),
    "tfs": (1, "top_p or min_p"),
    "tfs_z": (1, "top_p or min_p"),
    "top_a": (0, "min_p"),
    "top_n_sigma": (-1, "min_p"),
    "typ_p": (1, "top_p or min_p"),
    "typical_p": (1, "top_p or min_p"),
    "xtc_probability": (0, "temperature and min_p"),
}
REFUSED = NEUTRAL_VALUES | {name: (off,) for name, (off, _) in OTHER_SAMPLERS.items()}
# Parameters by which other servers are given a grammar.
OTHER_GRAMMARS = frozenset({"ebnf", "grammar", "json_schema", "regex"})
# OpenAI's own, about its accounts, records, caches and speed, and wishes that no model would
# notice; and what has no meaning without a sampler that is refused.
IGNORED = frozenset(
    {
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "metadata",
        "mirostat_eta",
        "mirostat_tau",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "xtc_threshold",
    }
)


class Body(APIRequest):
    """The whole body of a request."""

    ignored_fields: ClassVar = IGNORED
    refused_fields: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED

    model: str | None = None


def check_unknown_fields(body: Body, http: Request, refuse: bool) -> None:
    """Refuse fields that would change the answer if they were served; raises APIError.

    Unknown fields are logged and named in a header of the answer (written by `RequestId`); with
    `refuse`, they are refused too.
    """
    for name in body.model_extra or ():
        if name.startswith("guided_") or name in OTHER_GRAMMARS:
            name = cut(name)
            raise unsupported(
                name,
                f"{name} is no parameter of this API, and is not ignored: use "
                "structured_outputs or response_format.",
            )
    for path in body.refused():
        _, ours = OTHER_SAMPLERS.get(path, (None, None))
        instead = f", or use {ours}" if ours else ""
        raise unsupported(path, f"{path} is not supported by this server: leave it out{instead}.")
    unknown = list(islice(body.unknown_fields(), MAX_NAMED))
    if unknown and refuse:
        raise _refused(unknown[0])
    if unknown:
        http.state.unknown_fields = [field.path for field in unknown]
        named = ", ".join(field.path + did_you_mean(field) for field in unknown)
        log.info("unknown fields are ignored: %s, %s", named, http.state.request_id)


def _refused(unknown: UnknownField) -> APIError:
    return APIError(
        400,
        f"This API has no field {unknown.path}{did_you_mean(unknown)}, and this server refuses "
        "what it does not know (server.unknown_fields): leave it out.",
        code="unknown_parameter",
        param=unknown.path,
    )

"""Shared by all endpoints that generate: the engine, the tokenizer, the limits."""

import asyncio
import hashlib
import importlib.metadata
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request

from outrider.engine.api import EngineInfo, NewRequest, SamplingParams
from outrider.engine.processes.client import EngineClient, EngineUnavailableError
from outrider.engine.processes.heap import give_memory_back

from ..base.content import text_of
from ..base.errors import ContextLengthError, forbidden, invalid_value, model_not_found
from ..base.held import json_bytes
from ..base.off_loop import MANY_CHARS, off_loop
from ..base.request_key import request_key
from ..base.unknown_fields import Body, check_unknown_fields
from ..config.pair_settings import ALSO_CALLED
from ..config.server_settings import ServerSettings
from ..grammar.structured_outputs import GrammarChecker
from ..observe.metrics import Metrics
from ..text.fill_in_the_middle import FillInTheMiddle
from ..text.message_format import MessageFormat
from ..text.tokenizer import Tokenizer
from .answer_size import ENCODING_BYTES, check_answer_size, check_bytes
from .asked import Asked
from .generation import Sample, TextOptions
from .protocol import ChoiceFields
from .sampling import bad_word_ids, request_seed, sample_seed, sampling_params
from .sampling_defaults import SamplingDefaults

VERSION = importlib.metadata.version("outrider")
BAD_WORD_BYTES = 320  # of JSON, which are read in the time that tokenizing a bad word takes
# Longer texts are tokenized one at a time: each takes a hundred times its size in memory.
HUGE_CHARS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    client: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    message_format: MessageFormat
    grammars: GrammarChecker
    model_names: tuple[str, ...]  # names that requests may use; answers use the first
    unlisted_name: str | None  # another, which may say where the model is
    takes_any_name: bool
    settings: ServerSettings
    sampling_defaults: SamplingDefaults
    priority_keys: frozenset[str] | None  # digests of keys that may set `priority`; None: no keys
    fill_in_the_middle: FillInTheMiddle | None
    large_texts: asyncio.Lock = field(default_factory=asyncio.Lock)  # held to tokenize a large text
    # Held to write a part of a long answer: threads that compute keep each other, and the event
    # loop, waiting for the GIL.
    long_answers: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def engine_info(self) -> EngineInfo:
        """The engine's info; raises EngineUnavailableError until the engine was ready once."""
        if self.client.info is None:
            raise EngineUnavailableError(self.client.status_reason or "The engine is starting.")
        return self.client.info

    @property
    def fingerprint(self) -> str:
        """Identifies all that may change a request's answer: program, model, arithmetic."""
        info = self.engine_info
        parts = VERSION, self.model_name, info.device, info.target_dtype, info.draft_dtype
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]

    def check_model(self, given: str) -> None:
        """Raise APIError unless it is a name of the model."""
        if not (self.takes_any_name or given in self.model_names or given == self.unlisted_name):
            raise model_not_found(given, self.model_name)

    async def check_fields(self, body: Body, http: Request) -> None:
        """Refuse the name of another model, and fields that are not served; raises APIError.

        A request need not give a name.
        """
        if body.model:
            self.check_model(body.model)
        refuse = self.settings.unknown_fields == "refuse"
        await off_loop(json_bytes(http), check_unknown_fields, body, http, refuse)

    async def check_request(self, fields: ChoiceFields, http: Request, *, num_prompts: int) -> None:
        """Refuse what can be refused before there are prompts, and fill in the server's defaults;
        raises APIError.
        """
        await self.check_fields(fields, http)
        keys = self.priority_keys
        if fields.priority and keys is not None and request_key(http) not in keys:
            raise forbidden(
                "priority",
                "Only some API keys may set priority (server.priority_api_keys), and this is not "
                "one of them: leave it out.",
            )
        n = fields.num_samples
        name = "n" if n == fields.n else "best_of"
        if num_prompts * n > self.settings.max_prompts_times_n:
            raise invalid_value(
                name,
                f"{num_prompts} prompts times {name} = {n} are {num_prompts * n} sequences; this "
                f"server takes at most {self.settings.max_prompts_times_n} a request "
                "(server.max_prompts_times_n).",
            )
        if fields.stop_strings and not fields.detokenize:
            raise invalid_value(
                "stop", "stop strings are found in text: they need detokenize: true."
            )
        if fields.prompt_logprobs is not None and fields.stream:
            raise invalid_value("prompt_logprobs", "prompt_logprobs cannot be streamed.")
        fields.prompt_logprobs = self.num_logprobs(fields.prompt_logprobs, "prompt_logprobs")
        if fields.truncate_prompt_tokens == 0:
            raise invalid_value(
                "truncate_prompt_tokens",
                "truncate_prompt_tokens must be at least 1, or -1 for as many as fit.",
            )
        for param, given, limit in (
            ("stop", fields.stop_strings, "max_stop_strings"),
            ("stop_token_ids", fields.stop_token_ids, "max_stop_token_ids"),
            ("logit_bias", fields.logit_bias, "max_logit_bias"),
            ("bad_words", fields.bad_words, "max_bad_words"),
        ):
            if len(given) > (most := getattr(self.settings, limit)):
                raise invalid_value(
                    param,
                    f"{param} has {len(given)} entries; this server takes at most {most} "
                    f"(server.{limit}).",
                )
        if fields.stream_options is not None and not fields.stream:
            raise invalid_value("stream_options", "stream_options needs stream: true.")

    def num_logprobs(self, given: int | None, param: str) -> int | None:
        """How many alternatives to report for each token; -1 asks for as many as allowed."""
        most = self.settings.max_logprobs
        if given is not None and given > most:
            raise invalid_value(
                param,
                f"{param} is {given}; this server reports at most {most} alternatives "
                "(server.max_logprobs).",
            )
        return most if given == -1 else given

    async def tokenize(
        self,
        prompts: list[str] | list[list[int]],
        *,
        add_special_tokens: bool,
        must_fit: str | None = None,
    ) -> list[list[int]]:
        """Token ids of texts; ids are returned unchanged. Long texts do not block the event loop.

        `must_fit` names the field that the texts come from: then APIError is raised at once if one
        is longer than any text that fits into the context. It is also raised if a text may take
        more memory than a request has.
        """
        if must_fit is not None:
            self._check_length(prompts, param=must_fit)
        longest = max((len(each) for each in prompts if isinstance(each, str)), default=0)
        check_bytes(self.settings.max_answer_bytes, must_fit or "prompt", longest * ENCODING_BYTES)

        def encode() -> list[list[int]]:
            return [
                self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        num_chars = sum(map(len, prompts))
        if num_chars < HUGE_CHARS:
            return await off_loop(num_chars, encode, threshold=MANY_CHARS)
        async with self.large_texts:
            try:
                return await asyncio.to_thread(encode)
            finally:
                give_memory_back()

    async def predicted(self, fields: ChoiceFields) -> list[int]:
        """The tokens that the client expects of the answer, at most those of a whole context."""
        if fields.prediction is None:
            return []
        most = self.engine_info.max_model_len
        text = text_of(fields.prediction.content)[: most * self.tokenizer.longest_token]
        (ids,) = await self.tokenize([text], add_special_tokens=False)
        return ids[:most]

    def room(self, prompts: Sequence[Sequence[int]]) -> int:
        """The maximum tokens of answers to these prompts, if the request sets none."""
        fitting = max(1, self.engine_info.max_model_len - max(map(len, prompts)))
        return min(fitting, self.sampling_defaults.max_tokens or fitting)

    def most_prompt_tokens(self, fields: ChoiceFields, max_tokens: int | None) -> int | None:
        """How many tokens of a prompt the request wants to keep; None: all."""
        limit = fields.truncate_prompt_tokens
        if limit == -1:
            least = 1 if max_tokens is None else max_tokens
            return max(1, self.engine_info.max_model_len - least)
        return limit

    def truncate(
        self, fields: ChoiceFields, prompt: list[int], max_tokens: int | None
    ) -> list[int]:
        """The tokens of a prompt that the request wants to keep: the last ones, or the first."""
        limit = self.most_prompt_tokens(fields, max_tokens)
        if limit is None:
            return prompt
        return prompt[:limit] if fields.truncation_side == "right" else prompt[-limit:]

    async def samples(self, asked: Asked, num_bytes: int) -> list[Sample]:
        """All samples of each prompt, prompt-major; `num_bytes` are those of the request's JSON.

        Raises APIError for what the engine could never run.
        """
        num_bytes += BAD_WORD_BYTES * len(asked.fields.bad_words)
        return await off_loop(num_bytes, self._samples, asked)

    def _samples(self, asked: Asked) -> list[Sample]:
        fields = self.sampling_defaults.fill(asked.fields)
        asked = replace(asked, fields=fields)
        self._check_asked(asked)
        params, options = self._params(asked), self._text_options(asked)
        unique, named = uuid.uuid4().hex, fields.speculation.sources
        sources = None if named is None else tuple(ALSO_CALLED.get(name, name) for name in named)
        return [
            Sample(
                index,
                NewRequest(
                    request_id=f"{unique}-{index}",
                    prompt_token_ids=asked.prompts[index // fields.num_samples],
                    params=params[index % len(params)],
                    priority=fields.priority,
                    cache_salt=asked.salt,
                    returns_drafts=fields.speculation.trace,
                    reports_prompt=fields.return_progress and fields.stream,
                    predicted_token_ids=list(asked.predicted),
                    sources=sources,
                ),
                self.tokenizer,
                options,
                asked.readers[index] if asked.readers else None,
            )
            for index in range(len(asked.prompts) * fields.num_samples)
        ]

    def _params(self, asked: Asked) -> list[SamplingParams]:
        """Those of `num_samples` samples: of any prompt, or with budgets of thoughts of one prompt
        after the other. Raises APIError if the request may need more memory than one has.
        """
        seed = request_seed(asked.fields.seed)
        bad_words = bad_word_ids(asked.fields.bad_words, self.tokenizer)
        check_answer_size(
            self.settings.max_answer_bytes,
            asked,
            bad_words=bad_words,
            max_drafts=self.engine_info.max_drafts,
        )
        params = [
            sampling_params(asked, seed=sample_seed(seed, i), bad_words=bad_words)
            for i in range(asked.fields.num_samples)
        ]
        if any(asked.thinking):
            params = [replace(p, thinking=budget) for budget in asked.thinking for p in params]
        return params

    def _text_options(self, asked: Asked) -> TextOptions:
        fields = asked.fields
        return TextOptions(
            stop=fields.stop_strings,
            include_stop=fields.include_stop_str_in_output,
            detokenize=fields.detokenize,
            spaces_between_special=fields.spaces_between_special_tokens,
            skipped_ids=(
                self.tokenizer.special_ids - asked.shown_special_ids
                if fields.skip_special_tokens
                else frozenset()
            ),
        )

    def _check_asked(self, asked: Asked) -> None:
        fields = asked.fields
        for prompt in asked.prompts:
            self._check_prompt(prompt, param=asked.param, max_tokens=asked.max_tokens)
        self.check_token_ids(fields.stop_token_ids, "stop_token_ids")
        self.check_token_ids(fields.logit_bias, "logit_bias")
        self.check_token_ids(fields.allowed_token_ids or (), "allowed_token_ids")
        self._check_named(fields, asked.logprobs)
        if fields.min_tokens > asked.max_tokens:
            raise invalid_value(
                "min_tokens",
                f"min_tokens is {fields.min_tokens}, above max_tokens ({asked.max_tokens}).",
            )

    def _check_named(self, fields: ChoiceFields, logprobs: int | None) -> None:
        """Raise APIError if the tokens whose logprobs it names cannot be reported."""
        named, most = fields.logprob_token_ids or (), self.settings.max_logprobs
        self.check_token_ids(named, "logprob_token_ids")
        if len(named) > most:
            raise invalid_value(
                "logprob_token_ids",
                f"logprob_token_ids has {len(named)} entries; this server reports at most {most} "
                "logprobs beside a token (server.max_logprobs).",
            )
        if named and logprobs is None:
            raise invalid_value("logprob_token_ids", "logprob_token_ids needs logprobs.")

    def cache_salt(self, fields: ChoiceFields, http: Request) -> str:
        """Only requests with the same salt share cached prefixes and compiled grammars."""
        given, key = fields.cache_salt or "", request_key(http)
        if key is None or self.settings.share_cache_between_keys:
            return given
        return f"{key}:{given}"  # digests have one length, so no key can imitate another's salt

    def check_token_ids(self, token_ids: Collection[int], param: str) -> None:
        vocab_size = self.engine_info.vocab_size
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < vocab_size:
                raise invalid_value(
                    param,
                    f"Token id {token_id} is out of vocabulary: there are {vocab_size} tokens, "
                    f"0 to {vocab_size - 1}.",
                )

    def _check_length(self, prompts: list[str] | list[list[int]], *, param: str) -> None:
        max_model_len = self.engine_info.max_model_len
        for prompt in prompts:
            tokens = len(prompt) // self.tokenizer.longest_token  # a lower bound
            if isinstance(prompt, str) and tokens > max_model_len:
                raise ContextLengthError(
                    max_model_len=max_model_len,
                    prompt_tokens=tokens,
                    max_tokens=0,
                    param=param,
                    at_least=True,
                )

    def _check_prompt(self, prompt: list[int], *, param: str, max_tokens: int) -> None:
        if not prompt:
            raise invalid_value(param, f"The {param} is empty; it needs at least one token.")
        if len(prompt) + max_tokens > self.engine_info.max_model_len:
            raise ContextLengthError(
                max_model_len=self.engine_info.max_model_len,
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                param=param,
            )
        self.check_token_ids(prompt, param)

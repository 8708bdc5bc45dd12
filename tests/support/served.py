"""The application over a scripted engine, and what tests look at behind it."""

import functools
from typing import Any

from fastapi import routing
from fastapi._compat import v2 as fastapi_fields
from pydantic import TypeAdapter
from scripted_client import Play, ScriptedClient
from starlette.types import ASGIApp

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.server.api.sampling_defaults import NEUTRAL, SamplingDefaults
from outrider.server.config.settings import Settings
from outrider.server.http.app import create_app
from outrider.server.http.middleware import Gate
from outrider.server.text.tokenizer import Tokenizer

MODEL = "test-model"
_validators: dict[tuple[object, str, str], TypeAdapter[Any]] = {}


def _made_once(annotated: Any, *, config: Any = None) -> TypeAdapter[Any]:
    key = annotated.__origin__, repr(annotated.__metadata__), repr(config)
    if key not in _validators:
        _validators[key] = TypeAdapter(annotated, config=config)
    return _validators[key]


# FastAPI describes every answer of each route, and makes a validator for each of its fields, anew
# for every application: most of its time.
fastapi_fields.TypeAdapter = _made_once  # type: ignore[attr-defined]
routing.create_model_field = functools.cache(routing.create_model_field)  # type: ignore[attr-defined]


class Served:
    def __init__(
        self,
        play: Play,
        tokenizer: Tokenizer,
        *,
        compiler: GrammarCompiler | None = None,
        sampling_defaults: SamplingDefaults = NEUTRAL,
        pair: dict[str, Any] | None = None,
        **server: Any,
    ) -> None:
        self.client = ScriptedClient(play, vocab_size=tokenizer.backend.get_vocab_size())
        self.gate = Gate()
        self.tokenizer = tokenizer
        self.app: ASGIApp = create_app(
            self.client,
            tokenizer,
            self.gate,
            Settings(server={"served_model_name": MODEL} | server, **(pair or {})),
            compiler=compiler,
            sampling_defaults=sampling_defaults,
        )

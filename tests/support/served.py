"""The application over a scripted engine, and what tests look at behind it."""

from typing import Any

from scripted_client import Play, ScriptedClient
from starlette.types import ASGIApp

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.server.api.sampling_defaults import NEUTRAL, SamplingDefaults
from outrider.server.config.settings import Settings
from outrider.server.http.app import create_app
from outrider.server.http.middleware import Gate
from outrider.server.text.tokenizer import Tokenizer

MODEL = "test-model"


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

"""The application over a real engine with tiny models, without a socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from engines import engine_config
from in_process import InProcessEngine

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.server.config.settings import Settings
from outrider.server.http.app import create_app
from outrider.server.http.middleware import Gate
from outrider.server.text.tokenizer import Tokenizer


@asynccontextmanager
async def serving(
    pair: tuple[Path, Path],
    tokenizer: Tokenizer,
    eos_token_ids: tuple[int, ...] = (),
    server: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, InProcessEngine]]:
    config = replace(engine_config(*pair, **settings), eos_token_ids=eos_token_ids)
    compiler = None
    if eos_token_ids:
        size = tokenizer.backend.get_vocab_size()
        config = replace(config, token_table=tokenizer.token_table(size))
        compiler = GrammarCompiler(config.token_table, eos_token_ids, size)
    engine = InProcessEngine(config)
    await engine.start()
    app = create_app(
        engine,
        tokenizer,
        Gate(),
        Settings(server={"served_model_name": "tiny"} | (server or {})),
        compiler=compiler,
    )
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1") as http:
            yield http, engine
    finally:
        await engine.stop()

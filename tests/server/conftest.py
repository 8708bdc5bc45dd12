"""The application over a scripted engine, and the default pair behind a real socket."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessEngine
from proven_once import prove_once
from running_server import RunningServer, free_port, running_server
from scripted_client import Play, steps
from served import Served
from tiny_models import save_tiny_model
from tokenizers_for_tests import byte_fallback_tokenizer, byte_level_tokenizer

from outrider.engine.api import NewRequest, ReportProgress, RequestOutput
from outrider.engine.config import EngineConfig
from outrider.engine.processes import process_engine
from outrider.server.config.settings import Settings
from outrider.server.models import prepare
from outrider.server.models.pair import engine_config, prepare_pair
from outrider.server.models.prepare import Prepared
from outrider.server.text.tokenizer import Tokenizer

prove_once()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return byte_fallback_tokenizer()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> tuple[Path, Path]:
    size = tokenizer.backend.get_vocab_size()
    target, draft = (
        save_tiny_model(tmp_path_factory.mktemp("model"), seed=seed, vocab_size=size)
        for seed in (0, 1)
    )
    return target, draft


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Callable[..., Served]:
    """`serve(play, **server_settings)`; without a script, every answer is " Hello world"."""

    def hello(request: NewRequest) -> list[RequestOutput]:
        ids = tokenizer.encode(" Hello world", add_special_tokens=False)
        return steps(request, ids[: request.params.max_tokens])

    def make(play: Play = hello, **settings: Any) -> Served:
        return Served(play, tokenizer, **settings)

    return make


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command prepares its pair, and runs its engine, without processes that load torch."""

    async def prepared(settings: Settings, report: ReportProgress) -> Prepared:
        pair = prepare_pair(settings, report)
        return Prepared(pair.settings, engine_config(pair), pair.tokenizer)

    def engine(config: EngineConfig, report: ReportProgress, **_: float) -> InProcessEngine:
        return InProcessEngine(config, report)

    monkeypatch.setattr(prepare, "prepare", prepared)
    monkeypatch.setattr(process_engine, "ProcessEngine", engine)


@pytest.fixture(scope="session")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def _default_server(
    metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], RunningServer]]:
    settings = [
        "target.dtype=float32",
        "cache.num_pages=512",
        "engine.num_threads=1",
        "scheduler.max_num_seqs=4",
        "scheduler.max_queue_len=8",
        "server.max_body_bytes=100000",
        "server.tool_call_format=hermes",
        'server.api_keys=["key"]',
        f"server.metrics_port={metrics_port}",
    ]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    started: list[RunningServer] = []
    with ExitStack() as stack:

        def get() -> RunningServer:
            if not started or started[-1].process.poll() is not None:
                log = tmp_path_factory.mktemp("server") / "log"
                started.append(stack.enter_context(running_server(log, arguments, "key")))
            return started[-1]

        yield get


@pytest.fixture(scope="module")
def default_server(_default_server: Callable[[], RunningServer]) -> Iterator[RunningServer]:
    """The default pair behind a real socket, for all files of a worker; 4 requests run, 8 wait."""
    server = _default_server()
    yield server
    if server.process.poll() is None:
        server.wait_for("outrider_requests_running 0")
        assert server.metric("outrider_pages_used") == 0

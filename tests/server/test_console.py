"""What is printed while the server runs."""

import asyncio
import io
import logging
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from scripted_client import ScriptedClient

from outrider.engine.api import EngineStats
from outrider.server.cli.console import report_status, show_summary, status_line
from outrider.server.config.settings_loader import load_settings
from outrider.server.text.message_format import MessageFormat

HERMES = MessageFormat("{{ '<tool_call>' }}")


def idle_client() -> ScriptedClient:
    return ScriptedClient(lambda request: [], vocab_size=100)


def test_status_line_shows_rates_since_the_last_one() -> None:
    before = EngineStats(
        generation_tokens=100, drafted_per_position=[10, 10], accepted_per_position=[5, 5]
    )
    now = EngineStats(
        num_running=3,
        num_waiting=1,
        pages_used=7,
        pages_total=20,
        prompt_tokens=50,
        generation_tokens=150,
        drafted_per_position=[20, 20],
        accepted_per_position=[14, 11],
    )
    assert status_line(before, now, 2.0) == (
        "3 running, 1 waiting | 25.0 tokens/s | 25.0 prompt tokens/s | 75% accepted | 7/20 pages"
    )


def test_status_line_without_drafts_says_nothing_of_them() -> None:
    line = status_line(EngineStats(), EngineStats(generation_tokens=1), 1.0)
    assert "accepted" not in line


def test_status_line_without_an_engine_says_nothing_of_pages() -> None:
    assert status_line(EngineStats(), EngineStats(), 1.0) == "0 running, 0 waiting | 0.0 tokens/s"


def test_status_is_reported_only_under_load(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.server")

    async def run() -> None:
        client = idle_client()
        reporting = asyncio.create_task(report_status(client, 0.001))
        await asyncio.sleep(0.02)
        assert not caplog.text
        client.stats = EngineStats(num_running=1)
        while not caplog.text:
            await asyncio.sleep(0.001)
        reporting.cancel()

    asyncio.run(run())
    assert "1 running" in caplog.text


def test_summary_is_a_table_on_a_terminal_and_lines_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = load_settings(assignments=["draft.model=small-one"], environ={})
    info = idle_client().info
    assert info is not None
    caplog.set_level(logging.INFO, "outrider.server")
    for terminal in (True, False):
        output = io.StringIO()
        console = Console(file=output, force_terminal=terminal, width=120)
        show_summary(settings, info, HERMES, "http://127.0.0.1:8000", console)
        text = output.getvalue() if terminal else caplog.text
        for part in ("small-one", "k = 4", "1000 tokens", ":8000/v1", "cpu", "hermes"):
            assert part in text
        assert bool(caplog.text) != terminal


@pytest.mark.parametrize(
    ("model", "proposer", "says"),
    [
        ("small-one", "draft_model", "small-one (float32), k = 4"),
        ("a-head", "eagle3", "a-head (eagle3, float32), k = 4"),
        ("mtp", "mtp", "mtp (float32), k = 4"),
    ],
)
def test_summary_names_the_draft_and_its_kind(
    model: str, proposer: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(assignments=[f"draft.model={model}"], environ={})
    info = idle_client().info
    assert info is not None
    info = replace(info, proposer=proposer, draft_dtype="float32")
    caplog.set_level(logging.INFO, "outrider.server")
    show_summary(settings, info, HERMES, "http://127.0.0.1:8000", Console(file=io.StringIO()))
    assert f"draft: {says}" in caplog.text


def test_summary_names_the_sources_of_drafts(caplog: pytest.LogCaptureFixture) -> None:
    info = idle_client().info
    assert info is not None
    caplog.set_level(logging.INFO, "outrider.server")
    info = replace(info, sources=("prediction", "suffix"), proposer="suffix", draft_dtype=None)
    for each in (info, replace(info, sources=(), proposer=None)):
        console = Console(file=io.StringIO())
        show_summary(load_settings(environ={}), each, HERMES, "http://127.0.0.1:8000", console)
    assert [line for line in caplog.messages if "draft" in line.partition(": ")[0]] == [
        "draft: none: drafts need no model",
        "sources of drafts: prediction, suffix",
        "draft: none: the target decodes plainly",
    ]


def test_summary_says_how_much_another_tokenizer_has_in_common(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings, plain = (
        load_settings(assignments=["draft.model=other"], environ={}),
        idle_client().info,
    )
    assert plain is not None
    caplog.set_level(logging.INFO, "outrider.server")
    plain = replace(plain, proposer="draft_model", draft_dtype="float32")
    for share, shown in ((None, ""), (0.973, "97%"), (1.0, "100%")):
        info = replace(plain, share_of_text=share)
        caplog.clear()
        show_summary(settings, info, HERMES, "http://127.0.0.1:8000", Console(file=io.StringIO()))
        says = f", another tokenizer with {shown} of text in common" if shown else ""
        assert f"draft: other (float32), k = 4{says}" in caplog.messages


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "device: cuda, 2 GPUs share the target"),
        ("cpu", "device: cpu, 2 processes share the target"),
    ],
)
def test_summary_says_how_many_share_the_target(
    device: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings, plain = load_settings(environ={}), idle_client().info
    assert plain is not None
    caplog.set_level(logging.INFO, "outrider.server")
    shared = replace(plain, device=device, tensor_parallel=2)
    for info in (plain, shared, replace(shared, draft_tensor_parallel=2)):
        caplog.clear()
        show_summary(settings, info, HERMES, "http://127.0.0.1:8000", Console(file=io.StringIO()))
        assert (says in caplog.text) == (info is shared)
        assert ("share target and draft" in caplog.text) == (info.draft_tensor_parallel == 2)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"saved_by_windows_bytes": 3 * 2**30}, "sliding windows save 3.0 GiB"),
        (
            {"host_pages": 1000, "page_size_tokens": 16, "host_bytes": 2**31},
            "in host memory: up to 16,000 more cached tokens (2.0 GiB)",
        ),
    ],
)
def test_summary_says_how_memory_is_used(
    facts: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings, plain = load_settings(environ={}), idle_client().info
    assert plain is not None
    caplog.set_level(logging.INFO, "outrider.server")
    for info in (plain, replace(plain, **facts)):
        caplog.clear()
        show_summary(settings, info, HERMES, "http://127.0.0.1:8000", Console(file=io.StringIO()))
        assert (says in caplog.text) == (info is not plain)

"""Agents of the terminal: their prompts, tools and events, whatever a small model says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from running_server import RunningServer

pytestmark = [pytest.mark.model, pytest.mark.slow]

Run = Callable[..., str]

CODEX = """\
model = "{model}"
model_provider = "outrider"
check_for_update_on_startup = false
analytics.enabled = false

[model_providers.outrider]
name = "Outrider"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.mark.clients("node/node_modules/@openai/codex")
def test_codex_has_a_turn(run: Run, server: RunningServer, model: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CODEX.format(url=server.url, model=model))
    said = run(
        *("node", "codex", "exec", "--skip-git-repo-check", "--json", "Say hello."),
        cwd=tmp_path,
        CODEX_HOME=str(tmp_path),
    )
    *_, message, end = map(json.loads, said.splitlines())
    assert message["item"]["type"] == "agent_message"
    assert end["type"] == "turn.completed"
    assert end["usage"]["input_tokens"] > 1000  # its instructions, and what its tools take
    assert "POST /v1/responses 200" in server.log.read_text()

"""Agents of the terminal write a file: their prompts, tools and streams, over a scripted engine.

A small model calls no tools, and reads a prompt of 20,000 tokens for minutes. So the engine says
what a capable model would, and all else is real: the agent, HTTP, the prompt, the parsing of calls.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer
from scripted_client import steps
from served import MODEL, Served
from socket_server import on_a_socket
from tokenizers_for_tests import byte_level_wrapper, tokenizer_of

from outrider.engine.api import NewRequest, RequestOutput

pytestmark = pytest.mark.slow

Run = Callable[..., str]

MCP_SERVER = Path(__file__).parent / "programs/mcp_server.py"
TASK = "Write hello into greeting.txt."
TEMPLATE = """\
{% for tool in tools or [] %}[[tool {{ tool.function.name }}]] {{ tool | tojson }}
{% endfor %}
{% for message in messages %}[[{{ message.role }}]] {{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
{% endfor %}[[assistant]]"""
# What aider finds in answers, since it offers no tools.
WHOLE_FILE = "greeting.txt\n```\nhello\n```\n"
CODEX = """\
model = "{model}"
model_provider = "outrider"
model_context_window = {context}
check_for_update_on_startup = false
analytics.enabled = false

[model_providers.outrider]
name = "Outrider"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = 900000
"""


class Agent:
    """A server for one agent, which is to use a tool with these arguments in the folder."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self.folder = folder
        self.url = ""
        self.prompts: list[str] = []
        self.arguments: dict[str, dict[str, Any]] = {}  # by the tool's name
        wrapper = byte_level_wrapper()
        wrapper.chat_template = TEMPLATE
        self._tokenizer = tokenizer_of(wrapper)
        self.served = Served(self._answer, self._tokenizer, tool_call_format="hermes")
        self.set_context(400_000)

    def set_context(self, max_model_len: int) -> None:
        assert self.served.client.info is not None
        self.served.client.info = replace(self.served.client.info, max_model_len=max_model_len)

    def run_claude(self, *options: str) -> str:
        path = str(self.folder / "greeting.txt")
        self.arguments["Write"] = {"file_path": path, "content": "hello\n"}
        return self.run(
            *("node", "claude", "-p", TASK, "--model", MODEL, "--allowedTools", "Write"),
            *("--output-format", "json", *options),
            ANTHROPIC_BASE_URL=self.url,
            ANTHROPIC_AUTH_TOKEN="unused",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )

    def run(self, *command: str | Path, **environ: str) -> str:
        said = self._run(*command, cwd=self.folder, HOME=str(self.folder), **environ)
        assert (self.folder / "greeting.txt").read_text() == "hello\n"
        return said

    def _answer(self, request: NewRequest) -> Sequence[RequestOutput]:
        prompt = self._tokenizer.backend.decode(request.prompt_token_ids)
        self.prompts.append(prompt)
        ids = self._tokenizer.encode(self._text(prompt), add_special_tokens=False)
        return steps(request, [*ids, 0], finish="stop")

    def _text(self, prompt: str) -> str:
        if "[[tool]]" in prompt:
            return "Done."
        for name, arguments in self.arguments.items():
            if f"[[tool {name}]]" in prompt:
                call = json.dumps({"name": name, "arguments": arguments})
                return f"I write it.\n<tool_call>\n{call}\n</tool_call>"
        return WHOLE_FILE

    @property
    def num_generated(self) -> int:
        """All tokens of the answers, as they are counted for the metrics."""
        return sum(
            len(self._tokenizer.encode(self._text(p), add_special_tokens=False)) + 1
            for p in self.prompts
        )


@pytest.fixture
def agent(run: Run, tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(run, tmp_path)
    with on_a_socket(agent.served) as agent.url:
        yield agent


@pytest.mark.clients("node/node_modules/@anthropic-ai/claude-code")
def test_claude_code(agent: Agent) -> None:
    end = json.loads(agent.run_claude())
    assert (end["subtype"], end["is_error"], end["result"]) == ("success", False, "Done.")
    assert end["permission_denials"] == []
    first, second = agent.prompts
    assert "File created successfully" in second
    assert end["usage"]["output_tokens"] == agent.num_generated
    assert end["usage"]["input_tokens"] > len(first) / 2


@pytest.mark.clients("node/node_modules/@anthropic-ai/claude-code")
def test_claude_code_asks_for_fewer_tokens_if_the_context_is_small(agent: Agent) -> None:
    agent.set_context(10_000)
    said = agent.run_claude("--tools", "Write", "--system-prompt", "You write files.")
    assert json.loads(said)["result"] == "Done."
    asked = [request.params.max_tokens for (request,) in agent.served.client.submitted]
    assert 1000 < min(asked) <= max(asked) < 10_000  # of itself it asks for 32,000


@pytest.mark.clients("node/node_modules/@openai/codex")
@pytest.mark.parametrize("by_mcp", [False, True])
def test_codex(agent: Agent, by_mcp: bool) -> None:
    config = CODEX.format(url=agent.url, model=MODEL, context=400_000)
    if by_mcp:
        command = (
            f"command = {json.dumps(sys.executable)}\nargs = [{json.dumps(str(MCP_SERVER))}]\n"
        )
        config += f"[mcp_servers.notes]\n{command}cwd = {json.dumps(str(agent.folder))}\n"
        path = str(agent.folder / "greeting.txt")
        agent.arguments["mcp__notes__write"] = {"path": path, "content": "hello\n"}
    else:
        agent.arguments["exec_command"] = {"cmd": "echo hello > greeting.txt"}
    (agent.folder / "config.toml").write_text(config)
    said = agent.run(
        *("node", "codex", "exec", "--strict-config", "--skip-git-repo-check", "--json"),
        *("--dangerously-bypass-approvals-and-sandbox", TASK),
        CODEX_HOME=str(agent.folder),
    )
    *_, message, end = map(json.loads, said.splitlines())
    assert message["item"]["type"] == "agent_message"
    assert message["item"]["text"] == "Done."
    assert end["type"] == "turn.completed"
    assert end["usage"]["output_tokens"] == agent.num_generated


@pytest.mark.clients("node/node_modules/opencode-ai")
def test_opencode(agent: Agent) -> None:
    path = str(agent.folder / "greeting.txt")
    agent.arguments["write"] = {"filePath": path, "content": "hello\n"}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{agent.url}/v1"},
        "models": {MODEL: {"limit": {"context": 400_000, "output": 5000}}},
    }
    config = {"provider": {"outrider": provider}, "autoupdate": False, "share": "disabled"}
    (agent.folder / "opencode.json").write_text(json.dumps(config))
    said = agent.run(
        *("node", "opencode", "run", "--auto", "--format", "json"),
        *("--model", f"outrider/{MODEL}", "--title", "Greeting", TASK),
    )
    events = [json.loads(line) for line in said.splitlines()]
    (call,) = (event["part"] for event in events if event["type"] == "tool_use")
    assert call["state"]["status"] == "completed"
    ends = [event["part"] for event in events if event["type"] == "step_finish"]
    assert [end["reason"] for end in ends] == ["tool-calls", "stop"]
    assert sum(end["tokens"]["output"] for end in ends) == agent.num_generated
    asked = [request.params.max_tokens for (request,) in agent.served.client.submitted]
    assert asked == [5000, 5000]


@pytest.mark.clients("node/node_modules/@continuedev/cli")
def test_continue(agent: Agent) -> None:
    path = str(agent.folder / "greeting.txt")
    agent.arguments["Write"] = {"filepath": path, "content": "hello\n"}
    model = {"name": "Outrider", "provider": "openai", "model": MODEL, "apiKey": "unused"}
    model |= {"apiBase": f"{agent.url}/v1", "roles": ["chat", "edit", "apply"]}
    config = {"name": "test", "version": "1.0.0", "schema": "v1", "models": [model]}
    (agent.folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    said = agent.run(
        *("node", "cn", "--config", agent.folder / "config.yaml", "--auto", "-p", TASK),
        CONTINUE_TELEMETRY_ENABLED="0",
    )
    assert said.strip() == "Done."
    assert len(agent.prompts) == 2


@pytest.mark.clients("aider-chat")
def test_aider(agent: Agent) -> None:
    said = agent.run(
        *("aider-chat", "aider", "--model", f"openai/{MODEL}", "--edit-format", "whole"),
        *("--no-git", "--yes-always", "--no-check-update", "--analytics-disable"),
        *("--no-show-model-warnings", "--message", TASK, "greeting.txt"),
        OPENAI_API_BASE=f"{agent.url}/v1",
        OPENAI_API_KEY="unused",
        AIDER_ANALYTICS="false",
    )
    assert "Applied edit to greeting.txt" in said
    assert "Tokens: " in said
    assert len(agent.prompts) == 1


@pytest.mark.model
@pytest.mark.timeout(900)  # a busy machine reads its prompt for minutes
@pytest.mark.clients("node/node_modules/@openai/codex")
def test_codex_has_a_turn_with_a_real_model(
    run: Run, server: RunningServer, model: str, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(
        CODEX.format(url=server.url, model=model, context=400_000)
    )
    said = run(
        *("node", "codex", "exec", "--skip-git-repo-check", "--json", "Say hello."),
        cwd=tmp_path,
        timeout_s=840,
        CODEX_HOME=str(tmp_path),
    )
    *_, message, end = map(json.loads, said.splitlines())
    assert message["item"]["type"] == "agent_message"
    assert end["type"] == "turn.completed"
    assert end["usage"]["input_tokens"] > 1000  # its instructions, and what its tools take
    assert "POST /v1/responses 200" in server.log.read_text()

"""The default pair behind a real socket, asked through every API by its own client."""

import asyncio
import json
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel
from running_server import RunningServer

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
# Anthropic's client has no such parameter of its own any more.
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def ours(default_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{default_server.url}/v1", api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def theirs(default_server: RunningServer) -> Any:
    import anthropic  # takes seconds, which no other worker need spend

    return anthropic.Anthropic(base_url=default_server.url, api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def expected(ours: openai.OpenAI) -> str:
    """What a chat completion says, greedily."""
    chat = ours.chat.completions.create(
        model=MODEL, messages=ASKED, temperature=0, max_completion_tokens=12
    )
    text = chat.choices[0].message.content
    assert text
    assert "Paris" in text
    return text


def test_several_streams_at_once_say_what_one_says(
    default_server: RunningServer, expected: str
) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str | None:
        async with client.chat.completions.stream(
            model=MODEL, messages=ASKED, temperature=0, max_completion_tokens=12
        ) as stream:
            return (await stream.get_final_completion()).choices[0].message.content

    async def run() -> list[str | None]:
        async with openai.AsyncOpenAI(
            base_url=f"{default_server.url}/v1", api_key="key", max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client) for _ in range(4)))

    assert asyncio.run(run()) == [expected] * 4


def test_responses_say_what_chats_say(ours: openai.OpenAI, expected: str) -> None:
    request: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
    whole = ours.responses.create(input=QUESTION, **request)
    assert whole.output_text == expected
    with ours.responses.stream(input=QUESTION, **request) as stream:
        pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
        last = stream.get_final_response()
    assert "".join(pieces) == last.output_text == expected
    assert last.usage == whole.usage or last.usage.input_tokens_details.cached_tokens  # type: ignore[union-attr]
    # With a previous response, the prompt is the conversation.
    second = ours.responses.create(input="And of Italy?", previous_response_id=whole.id, **request)
    turns: list[Any] = [*ASKED, {"role": "assistant", "content": expected}]
    turns.append({"role": "user", "content": "And of Italy?"})
    assert second.output_text == ours.responses.create(input=turns, **request).output_text
    counted = ours.responses.input_tokens.count(
        model=MODEL, input="And of Italy?", previous_response_id=whole.id
    )
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens > 20
    ours.responses.delete(whole.id)
    with pytest.raises(openai.BadRequestError) as gone:
        ours.responses.create(input="And?", previous_response_id=whole.id, **request)
    assert gone.value.code == "previous_response_not_found"


def test_messages_say_what_chats_say(theirs: Any, expected: str) -> None:
    request: Any = {"model": MODEL, "max_tokens": 12, "messages": ASKED, **GREEDY}
    whole = theirs.messages.create(**request)
    assert whole.content[0].type == "text"
    assert whole.content[0].text == expected
    with theirs.messages.stream(**request) as stream:
        assert "".join(stream.text_stream) == expected
        last = stream.get_final_message()
    assert last.stop_reason == whole.stop_reason == "end_turn"
    count = theirs.messages.count_tokens(model=MODEL, messages=ASKED)
    usage = last.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    start = expected.partition(" is")[0]
    begun = [*ASKED, {"role": "assistant", "content": start}]
    goes_on = theirs.messages.create(**request | {"messages": begun})
    assert goes_on.content[0].type == "text"
    assert (start + goes_on.content[0].text).startswith(expected)


class City(BaseModel):
    name: str
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


def test_responses_are_parsed(ours: openai.OpenAI) -> None:
    response = ours.responses.parse(
        model=MODEL,
        input="Which city is the capital of France?",
        text_format=City,
        temperature=0,
        max_output_tokens=60,
    )
    assert response.output_parsed is not None
    assert response.output_parsed.name == "Paris"


def test_required_tools_are_called(ours: openai.OpenAI, theirs: Any) -> None:
    function = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    responses: Any = {"model": MODEL, "input": "How is the weather in Rome?", "temperature": 0}
    responses |= {"tools": [function], "parallel_tool_calls": False, "tool_choice": "required"}
    whole = ours.responses.create(**responses)
    with ours.responses.stream(**responses) as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
    (call,) = whole.output
    assert isinstance(call, openai.types.responses.ResponseFunctionToolCall)
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert "".join(pieces) == call.arguments
    assert len(pieces) > 1

    messages: Any = {"model": MODEL, "max_tokens": 200, **GREEDY}
    messages |= {"messages": [{"role": "user", "content": "How is the weather in Rome?"}]}
    messages |= {"tools": [{"name": "weather", "input_schema": PARAMETERS}]}
    messages |= {"tool_choice": {"type": "tool", "name": "weather"}}
    message = theirs.messages.create(**messages)
    (block,) = message.content
    assert block.type == "tool_use"
    assert block.input["city"] in ("Paris", "Rome")
    assert message.stop_reason == "tool_use"
    with theirs.messages.stream(**messages) as stream:
        assert stream.get_final_message().content[0].input == block.input


def test_agent_calls_a_tool_and_answers(default_server: RunningServer) -> None:
    import agents  # takes seconds, which no other worker need spend

    asked = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        return "It is sunny."

    async def run() -> Any:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{default_server.url}/v1", api_key="key") as client:
            agent = agents.Agent(
                name="Guide",
                tools=[agents.function_tool(weather)],
                model=agents.OpenAIResponsesModel(model=MODEL, openai_client=client),
                model_settings=agents.ModelSettings(
                    tool_choice="required", temperature=0, max_tokens=60
                ),
            )
            result = agents.Runner.run_streamed(agent, "How is the weather in Rome?")
            async for _ in result.stream_events():
                pass
            return result.final_output

    answer = asyncio.run(run())  # the choice is required for the first turn alone
    assert isinstance(answer, str)
    assert answer
    assert asked
    assert set(asked) <= {"Paris", "Rome"}


def test_clients_read_our_errors(
    ours: openai.OpenAI, theirs: Any, default_server: RunningServer
) -> None:
    import anthropic

    with pytest.raises(openai.NotFoundError):
        ours.responses.create(model="nothing", input="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ours.responses.create(model=MODEL, input="x", max_output_tokens=10**6)
    with pytest.raises(anthropic.NotFoundError):
        theirs.messages.create(model="nothing", max_tokens=1, messages=ASKED)
    with pytest.raises(anthropic.BadRequestError, match="exceed context limit"):
        theirs.messages.create(model=MODEL, max_tokens=20_000, messages=ASKED)
    stranger = anthropic.Anthropic(base_url=default_server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=MODEL, max_tokens=1, messages=ASKED)


def test_the_metrics_port_asks_for_no_key(
    ours: openai.OpenAI, default_server: RunningServer, metrics_port: int
) -> None:
    def num_tokens() -> float:
        text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
        (line,) = [x for x in text.splitlines() if x.startswith("vllm:generation_tokens_total{")]
        return float(line.split()[-1])

    before = num_tokens()
    answer = ours.completions.create(model=MODEL, prompt="x", max_tokens=3)
    assert answer.usage is not None
    assert num_tokens() == before + answer.usage.completion_tokens
    assert httpx.get(f"http://127.0.0.1:{metrics_port}/v1/models").status_code == 404
    assert httpx.get(f"{default_server.url}/metrics").status_code == 401


def test_leaving_client_frees_its_pages(default_server: RunningServer) -> None:
    for path, body in (
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4000, "ignore_eos": True}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 4000, "ignore_eos": True}),
    ):
        with default_server.http.stream("POST", path, json=body | {"stream": True}) as reply:
            lines = reply.iter_lines()  # a variable: a generator that is let go closes the answer
            next(lines)
            default_server.wait_for("outrider_requests_running 1")
        default_server.wait_for("outrider_pages_used 0")

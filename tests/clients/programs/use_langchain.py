"""What langchain-openai makes of a server. Arguments: its URL, its model."""

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
common = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0}
QUESTION = "What is the capital of France?"

chat = ChatOpenAI(**common, max_completion_tokens=12, stream_usage=True, max_retries=0)
answer = chat.invoke(QUESTION)
chunks = list(chat.stream(QUESTION))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
completion = OpenAI(**common, max_tokens=12).invoke("The capital of France is")


async def several() -> list[str]:
    return [message.content for message in await chat.abatch([QUESTION] * 4)]


print(
    json.dumps(
        {
            "chat": answer.content,
            "streamed": whole.content,
            "streamed_tokens": whole.usage_metadata["output_tokens"],
            "completion": completion,
            "tokens": answer.usage_metadata["output_tokens"],
            "reason": answer.response_metadata["finish_reason"],
            "several": asyncio.run(several()),
        }
    )
)

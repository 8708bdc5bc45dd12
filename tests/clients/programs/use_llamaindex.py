"""What LlamaIndex makes of a server. Arguments: its URL, its model."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
llm = OpenAILike(
    model=model,
    api_base=f"{url}/v1",
    api_key="unused",
    is_chat_model=True,
    temperature=0,
    max_tokens=12,
    max_retries=0,
)
messages = [ChatMessage(role="user", content="What is the capital of France?")]
answer = llm.chat(messages)
streamed = [chunk.delta or "" for chunk in llm.stream_chat(messages)]
llm.is_chat_model = False
completion = llm.complete("The capital of France is")

print(
    json.dumps(
        {
            "chat": answer.message.content,
            "streamed": "".join(streamed),
            "completion": completion.text,
            "tokens": answer.raw.usage.completion_tokens,
        }
    )
)

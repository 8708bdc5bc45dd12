"""What litellm makes of a server. Arguments: its URL, its model."""

import json
import sys

import litellm

url, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
common = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}
chat = {"model": f"hosted_vllm/{model}", "messages": QUESTION, **common}

answer = litellm.completion(**chat)
chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
completion = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="The capital of France is", **common
)


def refusal(**changed: object) -> str:
    try:
        litellm.completion(**(chat | changed))
    except Exception as error:
        return type(error).__name__
    return "none"


print(
    json.dumps(
        {
            "chat": answer.choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "streamed_tokens": litellm.stream_chunk_builder(chunks).usage.completion_tokens,
            "completion": completion.choices[0].text,
            "tokens": answer.usage.completion_tokens,
            "too_long": refusal(max_tokens=10**6),
            "wrong_model": refusal(model="hosted_vllm/nothing"),
            "wrong_value": refusal(temperature=-1),
        }
    )
)

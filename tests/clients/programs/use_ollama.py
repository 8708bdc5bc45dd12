"""What Ollama's own client makes of a server. Arguments: its URL, its model."""

import json
import sys

import ollama

url, model = sys.argv[1:]
client = ollama.Client(host=url)
options = {"temperature": 0, "num_predict": 12}
messages = [{"role": "user", "content": "What is the capital of France?"}]

answer = client.chat(model=model, messages=messages, options=options)
chunks = list(client.chat(model=model, messages=messages, options=options, stream=True))
completion = client.generate(
    model=model, prompt="The capital of France is", raw=True, options=options
)
schema = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
structured = client.chat(
    model=model, messages=messages, format=schema, options=options | {"num_predict": 40}
)
try:
    client.chat(model="another", messages=messages)
except ollama.ResponseError as error:
    wrong_model = error.status_code

print(
    json.dumps(
        {
            "chat": answer.message.content,
            "streamed": "".join(chunk.message.content or "" for chunk in chunks),
            "streamed_tokens": chunks[-1].eval_count,
            "completion": completion.response,
            "tokens": answer.eval_count,
            "models": [each.model for each in client.list().models],
            "fields": list(json.loads(structured.message.content or "")),
            "wrong_model": wrong_model,
        }
    )
)

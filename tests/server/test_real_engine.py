"""The application over the real engine, with tiny random models."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from from_pretrained import transformers_arguments
from tiny_server import serving
from transformers import AutoModelForCausalLM

from outrider.server.text.tokenizer import Tokenizer


@pytest.mark.parametrize("k", [0, 3])
def test_greedy_text_is_that_of_generate(
    pair: tuple[Path, Path], tokenizer: Tokenizer, k: int
) -> None:
    prompts = ["The quick brown fox", "naïve café 🙂", "Hello world, hello"]
    model = AutoModelForCausalLM.from_pretrained(
        pair[0], dtype=torch.float32, **transformers_arguments(pair[0])
    )
    expected = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=True)])
        output = model.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(output.tolist(), skip_special_tokens=True))

    async def run() -> list[str]:
        async with serving(pair, tokenizer, k=k) as (http, _):
            body = {"prompt": prompts, "temperature": 0, "max_tokens": 20}
            choices = (await http.post("/completions", json=body)).json()["choices"]
            return [choice["text"] for choice in choices]

    assert asyncio.run(run()) == expected


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_scores_its_prompt_as_the_model_does(
    pair: tuple[Path, Path], tokenizer: Tokenizer, max_tokens: int
) -> None:
    prompt = tokenizer.encode("The quick brown fox jumps over 🙂 " * 8, add_special_tokens=True)
    model = AutoModelForCausalLM.from_pretrained(
        pair[0], dtype=torch.float32, **transformers_arguments(pair[0])
    )
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)

    async def run() -> list[Any]:
        async with serving(pair, tokenizer, max_num_batched_tokens=32) as (http, _):
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            await http.post("/completions", json=body)  # fills the prefix cache
            body |= {"max_tokens": max_tokens, "echo": True, "logprobs": 1}
            plain = (await http.post("/completions", json=body)).json()["choices"]
            stream = await http.post("/completions", json=body | {"stream": True})
            first = json.loads(stream.text.split("\n\n")[0].removeprefix("data: "))
            return [plain[0]["logprobs"], first["choices"][0]["logprobs"]]

    whole, streamed = asyncio.run(run())
    assert whole == streamed
    own, top = whole["token_logprobs"], whole["top_logprobs"]
    assert own[0] is top[0] is None
    assert len(own) == len(prompt) + max_tokens
    scored = zip(prompt[1:], expected, own[1:], top[1:], strict=False)
    for token_id, row, logprob, alternatives in scored:
        assert logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        # How evaluation clients recognise a greedy token.
        assert (logprob == max(alternatives.values())) == (int(row.argmax()) == token_id)

"""How often a slice of the default target's first layers agrees with it, and what it costs.

    .venv/bin/python -P benchmarks/layer_slice.py

Prints, for each number of layers, the share of the target's greedy tokens that the slice names
first, each given the target's own text before it, and the time of a one-row pass relative to the
target's.
"""

import statistics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from outrider.server.models.resolve import resolve
from outrider.server.settings import DEFAULT_TARGET

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Explain photosynthesis in two sentences.",
    "Translate to Spanish: I like apples.",
    "List five colours.",
    "Tell me a short story about a dragon.",
    "What is 12 * 13?",
    "Write a poem about the sea.",
    "Who was Albert Einstein?",
    "Give me a recipe for pancakes.",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "What causes rain?",
)
NUM_LAYERS = (30, 1, 2, 3, 4, 6, 8, 10, 15, 20, 24, 28, 29)
OUTPUT_TOKENS = 80
TIMED_PASSES = 15


@torch.no_grad()
def main() -> None:
    path = resolve(DEFAULT_TARGET)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(**ids, max_new_tokens=OUTPUT_TOKENS, do_sample=False)
        answers.append((output, ids["input_ids"].shape[1]))
    layers, target_s = model.model.layers, None
    print("layers  agreement  cost")
    for num_layers in NUM_LAYERS:
        model.model.layers = layers[:num_layers]
        model.config.num_hidden_layers = num_layers
        agreed = [
            model(ids, use_cache=False).logits[0, start - 1 : -1].argmax(-1) == ids[0, start:]
            for ids, start in answers
        ]
        pass_s = one_row_pass_s(model, answers[0][0])
        target_s = target_s or pass_s
        agreement = torch.cat(agreed).float().mean().item()
        print(f"{num_layers:6}  {agreement:9.3f}  {pass_s / target_s:4.2f}", flush=True)


def one_row_pass_s(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Median time of a pass over one new token."""
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    times = []
    for _ in range(TIMED_PASSES):
        start = time.perf_counter()
        model(ids[:, -1:], past_key_values=cache)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()

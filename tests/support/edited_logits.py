"""What edits of logits mean, written to be read: the truth that the engine is held to."""

from collections import Counter
from pathlib import Path

import torch
from tiny_models import DEVICE
from transformers import AutoModelForCausalLM

from outrider.engine.api import SamplingParams


def edited(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    """Logits of the token after prompt and output. Shape: [V] -> [V] float64."""
    logits = logits.double().clone()
    vocab = len(logits)
    for token in set(range(vocab)) - set(params.allowed_token_ids or range(vocab)):
        logits[token] = -torch.inf
    for *before, last in params.bad_words:
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            logits[last] = -torch.inf
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -torch.inf
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def edited_greedy(path: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    """The target's greedy output under its edits, one token a pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(DEVICE)
    output: list[int] = []
    while len(output) < params.max_tokens:
        with torch.inference_mode():
            ids = torch.tensor([prompt + output], device=DEVICE)
            logits = model(ids, logits_to_keep=1).logits[0, -1]
        output.append(int(edited(logits.cpu(), prompt, output, params).argmax()))
        if output[-1] in params.stop_token_ids:
            break
    return output

"""The processed distribution of a target, written to be read: the truth about an engine."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from engines import run, tokens, without_pauses
from from_pretrained import transformers_arguments
from logits_processors import FavourParity
from tiny_models import DEVICE
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.engine.api import SamplingParams, ThinkingBudget
from outrider.engine.engine import Engine

Sequence = tuple[int, ...]
DEAD_END = -1  # stands at the end of an output that no token may follow
PROCESSORS = {"parity": FavourParity}


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
        late = logits.clone()
        late[list(params.stop_token_ids)] = -torch.inf
        logits = late if late.isfinite().any() else logits
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for choice in params.logits_processors:
        processor = PROCESSORS[choice.name](**choice.args)
        logits = processor(torch.tensor([prompt + output]), logits[None])[0]
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.thinking is not None and is_spent(params.thinking, prompt, output):
        close = params.thinking.close_token_id
        if logits[close] > -torch.inf:
            logits[torch.arange(vocab) != close] = -torch.inf
    return logits


def is_spent(budget: ThinkingBudget, prompt: list[int], output: list[int]) -> bool:
    """Whether the text ends within a thought, and thoughts may have no more tokens."""
    text, num_thought, thinks = output, 0, False
    if budget.begun:
        opened = max(i for i, token in enumerate(prompt) if token == budget.open_token_id)
        text = prompt[opened:] + output
    for token in text:
        if thinks:
            thinks = token != budget.close_token_id
            num_thought += thinks
        elif token == budget.open_token_id:
            thinks, num_thought = True, num_thought - budget.num_opening
    return thinks and num_thought >= budget.num_tokens


def filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution after temperature, top-k, top-p, min-p; all zero where all are banned.

    Shape: [V] -> [V] float64.
    """
    logits = logits.double()
    kept = torch.zeros_like(logits)
    order = sorted(range(len(logits)), key=lambda x: (-logits[x].item(), x))
    if logits[order[0]] == -torch.inf:
        return kept
    if params.temperature == 0:
        kept[order[0]] = 1
        return kept
    order = order[: params.top_k or None]
    p = (logits[order] / params.temperature).softmax(-1)
    before = p.cumsum(-1) - p
    keep = (before < params.top_p) & (p >= params.min_p * p[0])
    kept[torch.tensor(order)[keep]] = p[keep] / p[keep].sum()
    return kept


@cache
def _load(path: Path) -> PreTrainedModel:
    arguments = transformers_arguments(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **arguments)
    return model.eval().to(DEVICE)


def next_logits(path: Path, sequences: list[list[int]]) -> torch.Tensor:
    """Raw logits of the token after each sequence, all of one length. Shape: [N, V]."""
    with torch.inference_mode():
        ids = torch.tensor(sequences, device=DEVICE)
        logits: torch.Tensor = _load(path)(ids, logits_to_keep=1).logits[:, -1]
    return logits.cpu()


def joint(
    path: Path,
    prompt: list[int],
    params: SamplingParams,
    eos: tuple[int, ...] = (),
    mask: Callable[[list[int]], list[bool]] | None = None,
) -> dict[Sequence, float]:
    """Probability of every possible output: of max_tokens tokens, or shorter and stopped.

    `mask` says of an output which tokens a grammar lets follow.
    """
    stops = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, *eos}
    params = replace(params, stop_token_ids=(*params.stop_token_ids, *eos))  # for min_tokens
    ended: dict[Sequence, float] = {}
    going_on: dict[Sequence, float] = {(): 1.0}
    for _ in range(params.max_tokens):
        rows = next_logits(path, [[*prompt, *output] for output in going_on]) if going_on else ()
        outputs, going_on = going_on, {}
        for (output, chance), row in zip(outputs.items(), rows, strict=True):
            if mask is not None:
                row = row.masked_fill(~torch.tensor(mask(list(output))), -torch.inf)
            p = filtered(edited(row, prompt, list(output), params), params)
            if not p.any():
                ended[*output, DEAD_END] = chance
            for token in p.nonzero().squeeze(1).tolist():
                found = ended if token in stops else going_on
                found[*output, token] = chance * float(p[token])
    return ended | going_on


def greedy(path: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    """The most likely token under the edits, one after another."""
    output: list[int] = []
    while len(output) < params.max_tokens:
        (row,) = next_logits(path, [prompt + output])
        output.append(int(edited(row, prompt, output, params).argmax()))
        if output[-1] in params.stop_token_ids:
            break
    return output


def sample(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    max_k: int,
    n: int,
    batch: int = 240,
    predicted: tuple[list[int], ...] = ([],),
    sources: tuple[tuple[str, ...] | None, ...] = (None,),
) -> Counter[Sequence]:
    """n outputs, each with its own seed and its own k, `batch` at a time, with these predictions in
    turn, and for each k with these sources of drafts in turn.
    """
    counts: Counter[Sequence] = Counter()
    without_pauses(engine)
    for first in range(0, n, batch):
        each = [
            replace(params, seed=seed, num_speculative_tokens=seed % (max_k + 1))
            for seed in range(first, first + batch)
        ]
        predictions = [predicted[p.seed % len(predicted)] for p in each]
        named = [sources[p.seed // (max_k + 1) % len(sources)] for p in each]
        outputs = run(engine, [prompt] * batch, each, predictions, named)
        counts.update(tuple(tokens(o)) for o in outputs)
    return counts

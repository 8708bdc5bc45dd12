"""Drive an engine to the end, and the truths to hold it against."""

import functools
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from from_pretrained import transformers_arguments
from tiny_models import DEVICE
from transformers import AutoModelForCausalLM

from outrider.engine.api import NewRequest, RequestOutput, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine
from outrider.engine.models.heads.config import MTP_HEADS
from outrider.engine.proposers.lookup import Lookup, Pauses

if importlib.util.find_spec("gguf"):  # `make gpu` does without it
    import gguf

    # transformers makes this table, of thousands of names, anew for every module of a GGUF file.
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def engine_config(
    target: Path,
    draft: Path | None = None,
    *,
    k: int = 4,
    proposer: str | Sequence[str] = "draft_model",
    adaptive: bool = False,
    num_pages: int | None = 512,
    page_size: int = 4,
    prefix_caching: bool = True,
    state_interval: int = 2048,
    **scheduler: int,
) -> EngineConfig:
    """An fp32 engine, small enough to watch, on the GPU if there is one.

    A `proposer` that is one name drafts beside what requests predict.
    """
    sources = ("prediction", proposer) if isinstance(proposer, str) else tuple(proposer)
    if proposer == "none":
        sources = ()
    return EngineConfig(
        target=ModelConfig(path=str(target), dtype="float32"),
        draft=_draft_config(target, draft) if draft else None,
        device=str(DEVICE),
        speculation=SpeculationConfig(
            sources=sources if draft or "draft_model" not in sources else (),
            num_speculative_tokens=k,
            adaptive=adaptive,
            suffix_min_tokens=1,  # short texts of few tokens have hits
        ),
        cache=CacheConfig(
            page_size_tokens=page_size,
            num_pages=num_pages,
            prefix_caching=prefix_caching,
            state_interval_tokens=state_interval,
        ),
        scheduler=replace(SchedulerConfig(max_num_batched_tokens=64), **scheduler),
    )


def _draft_config(target: Path, draft: Path) -> ModelConfig:
    """A model that is its own draft is one whose MTP head drafts, if it has one."""
    model_type = json.loads((target / "config.json").read_text())["model_type"]
    is_mtp = draft == target and model_type in MTP_HEADS
    return ModelConfig(path=str(draft), dtype="float32", is_mtp=is_mtp)


def sampling_config(target: Path, draft: Path, proposer: str | Sequence[str]) -> EngineConfig:
    """An engine for many short samples at once, with any proposer and k = 3."""
    return engine_config(
        target,
        draft if "draft_model" in proposer else None,
        proposer=proposer,
        k=3,
        max_num_seqs=240,
        max_num_batched_tokens=2048,
        num_pages=1024,
    )


def without_pauses(engine: Engine) -> Engine:
    """The same engine, whose lookups are made in every step, though they bring nothing."""
    for source in engine.worker.proposer.sources:
        if isinstance(source, Lookup):
            source._pauses = Pauses(0)
    return engine


def lagging(config: EngineConfig) -> Engine:
    """An engine that launches each step before it has read the last one, as on a GPU."""
    engine = Engine(config)
    engine.scheduler.lag = 1
    return engine


def run(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    predicted: Sequence[list[int]] | None = None,
    sources: Sequence[tuple[str, ...] | None] | None = None,
) -> list[list[RequestOutput]]:
    """Submit all prompts at once, step to the end, check for leaks; outputs by prompt."""
    by_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    predicted = predicted or [[] for _ in prompts]
    each = zip(prompts, by_prompt, predicted, sources or [None for _ in prompts], strict=True)
    engine.submit(
        [
            NewRequest(
                request_id=str(i),
                prompt_token_ids=prompt,
                params=each_params,
                predicted_token_ids=text,
                sources=named,
            )
            for i, (prompt, each_params, text, named) in enumerate(each)
        ]
    )
    outputs: list[list[RequestOutput]] = [[] for _ in prompts]
    while engine.has_work():
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
    engine.check_integrity()
    assert engine.stats().pages_used == 0
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@functools.lru_cache(maxsize=1)
def _by_transformers(path: Path) -> Any:
    arguments = transformers_arguments(path)
    with pytest.MonkeyPatch.context() as patch:
        if arguments:  # the vocabulary would be read, word by word, for the config and the weights
            patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **arguments)
    return model.eval().to(DEVICE)


def generate(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The target's own greedy output, by transformers' generate."""
    ids = _by_transformers(path).generate(
        torch.tensor([prompt], device=DEVICE),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return [int(token_id) for token_id in ids[0, len(prompt) :]]


@torch.inference_mode()
def is_greedy(path: Path, prompt: list[int], output: list[int]) -> bool:
    """Whether each token is the target's likeliest behind those before it, by transformers' own
    code: by induction, whether it is the output that `generate` gives. One pass instead of one for
    every token.
    """
    ids = torch.tensor([[*prompt, *output]], device=DEVICE)
    logits = _by_transformers(path)(ids).logits[0, len(prompt) - 1 : -1]
    return bool((logits.argmax(-1) == ids[0, len(prompt) :]).all())


def prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]

"""Agents that come back: how long a long prompt takes the first time, and once others have
needed its pages.

    python benchmarks/returning.py [MODEL] [--draft HEAD] [--tokens-in 30000] [--turns 20]
        [--new-tokens 16] [--layers 8] [--seconds 40]

Needs torch, triton and transformers only. Without MODEL it takes layers of Qwen3-8B's shape with
random weights. Each turn sends the whole conversation again, with the last answer and a little
more. Between two turns somebody else sends a prompt as long, for which the device has no other room
than the conversation's; host memory has room for both. Answers are greedy. The last turn is
computed once more by an engine that keeps nothing, and must be answered alike. After `--seconds` no
further turn begins, so that it ends in any case.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from random_model import save_random_model

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine

PAGE = 16
ADDED_TOKENS = 100  # by each turn, besides the answer
IDS = range(100, 4000)  # of prompts


class Answer(NamedTuple):
    token_ids: list[int]
    num_cached_tokens: int
    first_token_s: float


def ask(engine: Engine, prompt: list[int], new_tokens: int) -> Answer:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start_s, first_s = time.perf_counter(), 0.0
    engine.submit([NewRequest(request_id="turn", prompt_token_ids=prompt, params=params)])
    token_ids, num_cached = list[int](), 0
    while engine.has_work():
        for output in engine.step():
            if output.token_ids and not token_ids:
                first_s = time.perf_counter() - start_s
            token_ids += output.token_ids
            num_cached = output.num_cached_tokens
    return Answer(token_ids, num_cached, first_s)


def configure(args: argparse.Namespace, model: str) -> EngineConfig:
    longest = args.tokens_in + args.turns * (args.new_tokens + ADDED_TOKENS) + args.new_tokens
    num_pages = longest // PAGE + 32
    return EngineConfig(
        target=ModelConfig(path=model, dtype=args.dtype),
        draft=ModelConfig(path=args.draft, dtype=args.dtype) if args.draft else None,
        device=args.device,
        max_model_len=longest,
        enforce_eager=True,  # starts sooner, and prompts run launch by launch anyway
        cache=CacheConfig(page_size_tokens=PAGE, num_pages=num_pages, host_gib=args.host_gib),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=args.chunk),
        speculation=SpeculationConfig(num_speculative_tokens=3 if args.draft else 0),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft")
    parser.add_argument("--tokens-in", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=8192, help="rows of a step")
    parser.add_argument("--host-gib", type=float, default=8.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=40.0)
    args = parser.parse_args()
    until_s = time.monotonic() + args.seconds
    rng = random.Random(0)
    with nullcontext(args.model) if args.model else tempfile.TemporaryDirectory() as model:
        if args.model is None:
            save_random_model(Path(model), args.layers)
        config = configure(args, model)
        engine = Engine(config)
        print(f"ready, with {until_s - time.monotonic():.0f} s left", flush=True)
        ask(engine, rng.choices(IDS, k=args.tokens_in), 2)  # compiles
        prompt, turns = rng.choices(IDS, k=args.tokens_in), list[Answer]()
        while len(turns) < args.turns and (not turns or time.monotonic() < until_s):
            turns.append(answer := ask(engine, prompt, args.new_tokens))
            last = prompt
            prompt = [*prompt, *answer.token_ids, *rng.choices(IDS, k=ADDED_TOKENS)]
            ask(engine, rng.choices(IDS, k=args.tokens_in), 1)
        stats = engine.stats()
        del engine
        if args.device == "cuda":
            torch.cuda.empty_cache()
        without = replace(config, cache=replace(config.cache, host_gib=0.0, prefix_caching=False))
        again = ask(Engine(without), last, args.new_tokens)
    first, later = turns[0].first_token_s, [turn.first_token_s for turn in turns[1:]]
    is_alike = again.token_ids == turns[-1].token_ids
    print(f"{args.tokens_in} tokens, {len(turns)} turns of {args.turns}, chunks of {args.chunk}")
    print(f"first turn: time to the first token             {first:.3f} s")
    if later:
        median = statistics.median(later)
        print(f"later turns, median                             {median:.3f} s")
        print(f"later turns, of the first                       {median / first:.1%}")
    print(f"cached tokens of the last turn                  {turns[-1].num_cached_tokens}")
    print(f"tokens that came back from host memory          {stats.host_loaded_tokens}")
    print(f"the last turn, computed anew, was answered      {'alike' if is_alike else 'otherwise'}")
    return 0 if is_alike else 1


if __name__ == "__main__":
    sys.exit(main())

"""Whether the same request is answered the same, to the bit, with any k and in any company.

    python benchmarks/same_answers.py TARGET DRAFT [--prompts IDS.json] [--k 0 2 3 4 6 8]
        [--sequences 64] [--new-tokens 64] [--without]

The truth is each request alone, without drafts: greedy, and seeded with `verification` "match".
It is then asked with every k; alone, in batches, and all at once; among sampled neighbours with
long prompts; in other pages and chunks, with preemption, with prefix hits; without CUDA graphs;
and with drafts from the prompt. Tokens, logprobs and the two likeliest tokens are compared. Exits
with 1 if any answer differs; with --without, `engine.batch_invariant` is off, to see that answers
then do differ. IDS.json is a list of prompts, each a list of token ids; random ones if left out.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine

Answer = list[tuple[int, float, tuple[tuple[int, float], ...]]]
Ask = tuple[list[int], SamplingParams]
START_S = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START_S:6.1f} s] {text}", flush=True)


def run(engine: Engine, asks: Sequence[Ask]) -> list[Answer]:
    """Answers to requests that arrive together; of those without logprobs, nothing."""
    engine.submit(
        [
            NewRequest(request_id=str(i), prompt_token_ids=p, params=q)
            for i, (p, q) in enumerate(asks)
        ]
    )
    answers: list[Answer] = [[] for _ in asks]
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            for token_id, entry in zip(output.token_ids, output.logprobs or (), strict=False):
                answers[int(output.request_id)].append((token_id, entry.logprob, tuple(entry.top)))
    return answers


class Comparison:
    def __init__(self, truth: list[Answer]) -> None:
        self.truth = truth
        self.num_answers = self.num_different = 0

    def check(self, how: str, answers: Sequence[Answer]) -> None:
        pairs = zip(self.truth, answers, strict=True)
        different = [i for i, (one, other) in enumerate(pairs) if one != other]
        self.num_answers += len(answers)
        self.num_different += len(different)
        say(f"{how}: {len(answers) - len(different)} of {len(answers)} equal")
        for i in different[:1]:
            tokens = enumerate(zip(self.truth[i], answers[i], strict=False))
            where = next((at for at, (one, other) in tokens if one != other), "its length")
            say(f"    the first that differs: answer {i}, token {where}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 2, 3, 4, 6, 8])
    parser.add_argument("--sequences", type=int, default=64, help="how many run at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--without", action="store_true", help="engine.batch_invariant = false")
    args = parser.parse_args()
    most_k, sequences = max(args.k), args.sequences

    def engine(
        k: int = most_k,
        sequences: int = sequences,
        page: int = 16,
        pages: int | None = None,
        chunk: int = 2048,
        max_model_len: int = 2048,
        **more: bool | str,
    ) -> Engine:
        source = more.get("source", "draft_model")
        started = Engine(
            EngineConfig(
                target=ModelConfig(path=args.target, dtype=args.dtype),
                draft=ModelConfig(path=args.draft, dtype=args.dtype) if k else None,
                device=args.device,
                batch_invariant=not args.without,
                enforce_eager=bool(more.get("eager", False)),
                max_model_len=max_model_len,
                cache=CacheConfig(
                    page_size_tokens=page,
                    num_pages=pages or 1 + sequences * (max_model_len // page),
                ),
                scheduler=SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=chunk),
                speculation=SpeculationConfig(
                    num_speculative_tokens=k, adaptive=False, sources=(source,) if k else ()
                ),
            )
        )
        say(f"started: k = {k}, {sequences} sequences, pages of {page}, chunks of {chunk}, {more}")
        return started

    generator = torch.Generator().manual_seed(5)
    vocab_size = json.loads((Path(args.target) / "config.json").read_text())["vocab_size"]

    def random(length: int) -> list[int]:
        return torch.randint(3, vocab_size, (length,), generator=generator).tolist()

    if args.prompts:
        prompts = json.loads(args.prompts.read_text())
    else:
        prompts = [random(20 + 9 * i) for i in range(12)]
    prompts += [random(700), random(1100)]
    greedy = SamplingParams(
        max_tokens=args.new_tokens, temperature=0.0, logprobs=2, ignore_eos=True
    )
    seeded = replace(greedy, temperature=0.8, verification="match")
    asks = [(prompt, greedy) for prompt in prompts]
    asks += [(prompt, replace(seeded, seed=i)) for i, prompt in enumerate(prompts)]

    def with_k(k: int) -> list[Ask]:
        return [(prompt, replace(q, num_speculative_tokens=k)) for prompt, q in asks]

    mixed = [with_k(args.k[i % len(args.k)])[i] for i in range(len(asks))]
    alone = engine(k=0, sequences=1, chunk=512)
    compare = Comparison([run(alone, [ask])[0] for ask in asks])
    tokens = {token for answer in compare.truth for token, *_ in answer}
    say(f"the truth: {len(asks)} answers with {len(tokens)} different tokens")
    del alone

    many = engine()
    for k in args.k:
        compare.check(f"k = {k}, alone", [run(many, [ask])[0] for ask in with_k(k)])
        compare.check(f"k = {k}, all at once", run(many, with_k(k)))
    stats = many.stats()
    say(f"{sum(stats.accepted_per_position)} of {sum(stats.drafted_per_position)} drafts accepted")
    sampled = SamplingParams(max_tokens=args.new_tokens, temperature=1.0, ignore_eos=True)
    neighbours = [
        (
            random(900 + 100 * (i % 5) if i % 8 == 0 else 10 + 7 * i % 90),
            replace(sampled, seed=100 + i, top_k=9 * (i % 3)),
        )
        for i in range(sequences)
    ]
    among = run(many, mixed + neighbours)[: len(asks)]
    compare.check(f"each its own k, among {sequences} sampled neighbours", among)
    for size in (2, 8, 24):
        answers: list[Answer] = []
        for i in range(0, len(asks), size):
            answers += run(many, mixed[i : i + size])
        compare.check(f"each its own k, {size} at once", answers)
    del many

    few = engine(sequences=16, page=32, chunk=96, pages=61, max_model_len=1280)
    compare.check("few pages of 32, chunks of 96", run(few, asks))
    say(f"{few.stats().preemptions} preemptions")
    compare.check("again, with prefix hits", run(few, asks))
    del few
    compare.check("pages of 8, no graphs", run(engine(sequences=8, page=8, eager=True), asks))
    compare.check("drafts from the prompt", run(engine(source="suffix", chunk=333), asks))
    equal = compare.num_answers - compare.num_different
    say(f"{equal} of {compare.num_answers} answers equal to the bit")
    return int(compare.num_different > 0)


if __name__ == "__main__":
    sys.exit(main())

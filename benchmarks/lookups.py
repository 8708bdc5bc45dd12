"""How long a lookup takes a sequence and step, beside reading the whole text each time.

.venv/bin/python -P benchmarks/lookups.py --num-seqs 64 --num-tokens 8192
"""

import argparse
import random
import time
from statistics import median

import numpy as np

from outrider.engine.proposers.predictions import longest_suffix
from outrider.engine.proposers.suffix import RecentAnswers, Suffixes


def text(kind: str, num_tokens: int, rng: random.Random) -> list[int]:
    """Tokens of which few, some or most are repeats."""
    if kind == "random":
        return [rng.randrange(50_000) for _ in range(num_tokens)]
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        if kind == "repeats" and token_ids:
            first = rng.randrange(len(token_ids))
            token_ids += token_ids[first : first + rng.randrange(1, 40)]
        token_ids += [int(rng.paretovariate(0.5)) % 50_000 for _ in range(rng.randrange(1, 20))]
    return token_ids[:num_tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--num-steps", type=int, default=50)
    args = parser.parse_args()
    rng = random.Random(0)
    print("text      entering a prompt   a step's lookup   reading all   (µs a sequence)")
    for kind in ("random", "words", "repeats"):
        texts = [text(kind, args.num_tokens, rng) for _ in range(args.num_seqs)]
        lookups = [Suffixes(2, "", RecentAnswers(0)) for _ in texts]
        prompt_s, steps_s, reading_s = [], [], []
        for step in range(args.num_steps):
            start_s = time.perf_counter()
            for lookup, token_ids in zip(lookups, texts, strict=True):
                lookup.find(token_ids, 65)
            (steps_s if step else prompt_s).append(time.perf_counter() - start_s)
            for token_ids in texts:
                first = rng.randrange(len(token_ids) - 4)
                token_ids += token_ids[first : first + 3]
        for token_ids in texts:
            whole_np = np.array(token_ids, dtype=np.int32)
            start_s = time.perf_counter()
            longest_suffix(whole_np[:-1], whole_np, 1, 4)
            reading_s.append(time.perf_counter() - start_s)
        each = 1e6 / args.num_seqs
        print(
            f"{kind:10}{each * prompt_s[0]:17.0f}{each * median(steps_s):18.1f}"
            f"{1e6 * median(reading_s):14.1f}"
        )


if __name__ == "__main__":
    main()

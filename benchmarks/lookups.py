"""How long a lookup takes a sequence and step, in CPU time of the thread, and what it brings.

.venv/bin/python -P benchmarks/lookups.py --num-seqs 64 --num-tokens 8192

Tokens a step are counted as if every draft were verified that is found: they are the same in every
run. Edits: a file of this project is read, and written with other names and lines. Turns: an answer
quotes the conversation before it. Again: another conversation has had such an answer.
"""

import argparse
import random
import re
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.proposers.predictions import longest_suffix
from outrider.engine.proposers.suffix import RecentAnswers, Suffixes
from outrider.engine.request import Request

ROOT = Path(__file__).resolve().parents[1]
MOST_DRAFTS = 32


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


def print_times(num_seqs: int, num_tokens: int, num_steps: int) -> None:
    rng = random.Random(0)
    print("µs a sequence   entering a prompt   a step's lookup: median   p90   reading all")
    for kind in ("random", "words", "repeats"):
        texts = [text(kind, num_tokens, rng) for _ in range(num_seqs)]
        lookups = [Suffixes(2, "", RecentAnswers(0)) for _ in texts]
        prompts, steps, readings = [], [], []
        for step in range(num_steps):
            for lookup, token_ids in zip(lookups, texts, strict=True):
                start_ns = time.thread_time_ns()
                lookup.find(token_ids, 2 * MOST_DRAFTS + 1)
                (steps if step else prompts).append(time.thread_time_ns() - start_ns)
                first = rng.randrange(len(token_ids) - 4)
                token_ids += token_ids[first : first + 3]
        for token_ids in texts:
            whole_np = np.array(token_ids, dtype=np.int32)
            start_ns = time.thread_time_ns()
            longest_suffix(whole_np[:-1], whole_np, 1, 4)
            readings.append(time.thread_time_ns() - start_ns)
        median, p90 = np.percentile(steps, (50, 90)) / 1e3
        print(
            f"{kind:12}{np.median(prompts) / 1e3:19.0f}{median:27.1f}{p90:6.1f}"
            f"{np.median(readings) / 1e3:14.1f}"
        )


def words(path: str) -> list[str]:
    return re.findall(r" ?\w+|\n *|[^\w\s]", (ROOT / path).read_text())


def edited(before: Sequence[str], rng: random.Random) -> list[str]:
    """With two names changed throughout, and about every twentieth line left out or said twice."""
    names = rng.sample(sorted({word for word in before if len(word) > 5}), 2)
    after: list[str] = []
    line: list[str] = []
    for word in before:
        line.append(word + "_" if word in names else word)
        if word.startswith("\n"):
            after += line * rng.choices((1, 0, 2), (38, 1, 1))[0]
            line = []
    return after + line


def quoting(before: Sequence[str], rng: random.Random) -> list[str]:
    """Pieces of what was said, with new words between them."""
    after: list[str] = []
    for _ in range(30):
        first = rng.randrange(len(before))
        after += before[first : first + rng.randrange(5, 40)]
        after += [f"new{rng.randrange(500)}" for _ in range(rng.randrange(1, 12))]
    return after


def tokens_a_step(
    prompt: list[int], answer: list[int], answers: RecentAnswers, min_tokens: int = 2
) -> float:
    lookup, known, num_steps = Suffixes(min_tokens, "", answers), list(prompt), 0
    while (num_left := len(prompt) + len(answer) - len(known)) > 0:
        found = lookup.find(known, 2 * MOST_DRAFTS + 1)
        drafts = found.token_ids[:MOST_DRAFTS] if found else []
        ahead = answer[-num_left:]
        pairs = zip(drafts, ahead, strict=False)
        known += ahead[: 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]
        num_steps += 1
    return len(answer) / num_steps


def print_tokens() -> None:
    rng = random.Random(0)
    ids: dict[str, int] = {}

    def numbers(read: Sequence[str]) -> list[int]:
        return [ids.setdefault(word, len(ids)) for word in read]

    code = [words(str(p.relative_to(ROOT))) for p in sorted(ROOT.glob("engine/*/*.py"))[:30]]
    talk = [words(f"docs/{name}.md") for name in ("how-it-works", "pairs", "api", "scaling")]
    repeats = [text("repeats", 4000, rng) for _ in range(8)]
    kinds = {
        "repeats": [(each[:1000], each[1000:]) for each in repeats],
        "edits": [(numbers(each), numbers(edited(each, rng))) for each in code],
        "turns": [(numbers(each), numbers(quoting(each, rng))) for each in talk * 4],
    }
    print("\ntokens a step")
    for kind, pairs in kinds.items():
        rates = [tokens_a_step(*pair, RecentAnswers(0)) for pair in pairs]
        print(f"{kind:12}{np.mean(rates):.3f}")
    answers, rates = RecentAnswers(64 << 20), []
    for _, answer in kinds["turns"]:
        new = NewRequest(
            request_id="", prompt_token_ids=[1] * 8, params=SamplingParams(max_tokens=1)
        )
        request = Request(new)
        request.token_ids += answer
        answers.add(request)
    for prompt, answer in kinds["turns"]:
        rates.append(tokens_a_step(prompt[-100:], quoting_again(answer, rng), answers))
    print(f"{'again':12}{np.mean(rates):.3f}")


def quoting_again(answer: list[int], rng: random.Random) -> list[int]:
    """The answer, with a word changed now and then."""
    return [rng.randrange(10**6, 2 * 10**6) if rng.random() < 0.05 else each for each in answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--num-steps", type=int, default=50)
    args = parser.parse_args()
    print_times(args.num_seqs, args.num_tokens, args.num_steps)
    print_tokens()


if __name__ == "__main__":
    main()

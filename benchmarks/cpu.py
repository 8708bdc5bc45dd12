"""What a user of the default pair gets on this CPU: ratios, every line measured in one run.

Plain decoding against transformers' `generate` on the same threads, eight streams against one,
speculation against plain decoding, and where the time of a step goes.

    python benchmarks/cpu.py [--dtype bfloat16] [--threads 2] [--new-tokens 64] [--repeats 3]
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from step_parts import PARTS, timed_parts
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.engine.api import NewRequest, SamplingParams, ignore_progress
from outrider.engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from outrider.engine.engine import Engine
from outrider.engine.models.weight_files import GGUF
from outrider.server.models.builtin import BUILTINS, obtain

QUESTIONS = [
    "Explain what a hash table is and when to use one.",
    "Write a Python function that merges two sorted lists.",
    "Give me a recipe for lentil soup.",
    "Why is the sky blue?",
    "Repeat this list, sorted by price: apples 3, pears 2, plums 5, figs 4, dates 6.",
    "Translate to French: The train leaves at nine and arrives before noon.",
    "Summarise: the committee met, argued for six hours, and agreed to meet again.",
    'Return JSON with the keys "name" and "age" for Ada, who is 36.',
]


def build(config: dict[str, Any], dtype: str) -> Engine:
    target = ModelConfig(
        path=str(obtain(BUILTINS["smollm2-135m-instruct"], ignore_progress)), dtype=dtype
    )
    draft = ModelConfig(
        path=str(obtain(BUILTINS["smollm2-135m-instruct-draft"], ignore_progress)),
        # As in the default config: rounded where that pays.
        dtype="auto" if dtype == "bfloat16" else dtype,
    )
    return Engine(
        EngineConfig(
            target=target,
            draft=draft,
            # Without a prefix cache, so that every repeat computes the same.
            cache=CacheConfig(num_pages=4096, prefix_caching=False),
            speculation=SpeculationConfig(**{"adaptive": False} | config),
        )
    )


def decode(engine: Engine, prompts: list[list[int]], new_tokens: int, temperature: float) -> float:
    """Tokens a second of these prompts, run together."""
    params = SamplingParams(max_tokens=new_tokens, temperature=temperature, ignore_eos=True)
    engine.submit(
        [
            NewRequest(request_id=str(i), prompt_token_ids=prompt, params=params)
            for i, prompt in enumerate(prompts)
        ]
    )
    start_s = time.perf_counter()
    while engine.has_work():
        engine.step()
    return len(prompts) * new_tokens / (time.perf_counter() - start_s)


def decode_each(engine: Engine, prompts: list[list[int]], args: argparse.Namespace) -> float:
    return statistics.harmonic_mean(
        [decode(engine, [prompt], args.new_tokens, args.temperature) for prompt in prompts]
    )


def generate_each(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> float:
    rates = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        start_s = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=args.new_tokens,
            max_new_tokens=args.new_tokens,
            do_sample=args.temperature > 0,
        )
        rates.append(args.new_tokens / (time.perf_counter() - start_s))
    return statistics.harmonic_mean(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    path = obtain(BUILTINS["smollm2-135m-instruct"], ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    hugging_face = AutoModelForCausalLM.from_pretrained(
        path, dtype=args.dtype, gguf_file=GGUF
    ).eval()
    plain = build({"sources": ()}, args.dtype)
    speculating = {
        f"{name}, k = {k}": build({"sources": (source,), "num_speculative_tokens": k}, args.dtype)
        for name, source, k in (
            ("draft", "draft_model", 2),
            ("draft", "draft_model", 4),
            ("suffix", "suffix", 4),
        )
    }
    rows: dict[str, Callable[[], float]] = {
        "transformers generate": lambda: generate_each(hugging_face, prompts, args),
        "plain": lambda: decode_each(plain, prompts, args),
        "plain, 8 streams": lambda: decode(plain, prompts, args.new_tokens, args.temperature),
        **{
            name: lambda engine=engine: decode_each(engine, prompts, args)  # type: ignore[misc]
            for name, engine in speculating.items()
        },
        **{
            f"{name}, 8 streams": lambda engine=engine: decode(  # type: ignore[misc]
                engine, prompts, args.new_tokens, args.temperature
            )
            for name, engine in speculating.items()
        },
    }
    # Interleaved, so that a machine that slows down slows every row alike; the first is warm-up.
    rates: dict[str, list[float]] = defaultdict(list)
    for repeat in range(args.repeats + 1):
        for name, measure in rows.items():
            rate = measure()
            if repeat:
                rates[name].append(rate)
    with timed_parts(plain) as spent:
        rows["plain, 8 streams"]()
    medians = {name: statistics.median(values) for name, values in rates.items()}

    console = Console()
    table = Table(title=f"SmolLM2-135M-Instruct, {args.dtype}, {args.threads} threads")
    for heading in ("", "tokens/s", "of generate", "of plain", "accepted"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, rate in medians.items():
        base = medians["plain, 8 streams" if "8 streams" in name else "plain"]
        engine = speculating.get(name)
        accepted = ""
        if engine is not None:
            stats = engine.stats()
            drafted = sum(stats.drafted_per_position)
            accepted = f"{sum(stats.accepted_per_position) / max(1, drafted):.3f}"
        table.add_row(
            name,
            f"{rate:.1f}",
            f"{rate / medians['transformers generate']:.2f}",
            f"{rate / base:.2f}",
            accepted,
        )
    console.print(table)
    shares = {part: sum(spent[part]) / sum(spent["step"]) for part in PARTS}
    shares["rest"] = 1 - sum(shares.values())
    console.print(
        "A plain step at 8 streams: "
        + ", ".join(f"{part} {share:.1%}" for part, share in shares.items())
    )
    ratio = medians["plain, 8 streams"] / medians["plain"]
    console.print(f"8 streams over 1: {ratio:.2f}")


if __name__ == "__main__":
    main()

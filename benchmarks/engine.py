"""Tokens a second of a pair, and where a step's time goes, by batch size and k.

    python benchmarks/engine.py TARGET DRAFT [--device cuda] [--k 0 4] [--batch 1 8 32 64]

Needs torch, triton and transformers only. Prompts are random token ids, 128 of them, and 256 tokens
are decoded, as in the tables of other engines this is compared with. The floor is that of the
weights that a step reads once; the parts are timed one after the other, so that what the step takes
less than their sum is host time that the GPU hid.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from step_parts import PARTS, timed_parts

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.loop import Engine
from outrider.engine.paged_model import PagedModel


def build(args: argparse.Namespace, k: int) -> Engine:
    return Engine(
        EngineConfig(
            target=ModelConfig(path=args.target, dtype=args.dtype),
            draft=ModelConfig(path=args.draft, dtype=args.dtype) if k else None,
            device=args.device,
            enforce_eager=args.enforce_eager,
            max_model_len=4096,
            cache=CacheConfig(prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=max(args.batch), max_num_batched_tokens=8192),
            speculation=SpeculationConfig(num_speculative_tokens=k, adaptive=False),
        )
    )


def run(
    engine: Engine, batch: int, new_tokens: int, prompt_tokens: int, temperature: float
) -> float:
    """Decode a batch to its end; returns tokens a second once the prompts are computed."""
    generator = torch.Generator().manual_seed(batch)
    engine.submit(
        [
            NewRequest(
                request_id=str(i),
                prompt_token_ids=torch.randint(
                    2, engine.info.vocab_size, (prompt_tokens,), generator=generator
                ).tolist(),
                params=SamplingParams(
                    max_tokens=new_tokens, temperature=temperature, seed=i, ignore_eos=True
                ),
            )
            for i in range(batch)
        ]
    )
    while engine.stats().generation_tokens == 0 or engine.stats().num_waiting:
        engine.step()
    first = engine.stats().generation_tokens
    start_s = time.perf_counter()
    while engine.has_work():
        engine.step()
    return (engine.stats().generation_tokens - first) / (time.perf_counter() - start_s)


def weight_bytes(path: str, model: PagedModel) -> int:
    """What one pass reads of the weights: all but the embeddings, of which it reads a few rows."""
    on_disk = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    embeddings = model.model.get_input_embeddings().weight
    return on_disk - (0 if model.model.config.tie_word_embeddings else embeddings.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tb-per-s", type=float, default=4.3, help="of the floor: a copy's rate")
    args = parser.parse_args()

    columns = "  ".join(f"{part:>8}" for part in PARTS)
    print(
        f" k batch temp  tokens/s  accepted  step ms  floor ms  | median ms, each alone: {columns}"
    )
    for k in args.k:
        engine = build(args, k)
        read_bytes = weight_bytes(args.target, engine.target._model)
        if k:
            read_bytes += k * weight_bytes(args.draft, engine.proposer._draft)
        floor_ms = read_bytes / args.tb_per_s / 1e9
        for batch in args.batch:
            for temperature in (0.0, 1.0):
                before = engine.stats()
                rate = run(engine, batch, args.new_tokens, args.prompt_tokens, temperature)
                after = engine.stats()
                drafted = sum(after.drafted_per_position) - sum(before.drafted_per_position)
                accepted = sum(after.accepted_per_position) - sum(before.accepted_per_position)
                tokens = after.generation_tokens - before.generation_tokens
                step_ms = 1e3 * (tokens / rate) / (after.steps - before.steps)
                with timed_parts(engine, synchronize=args.device != "cpu") as spent:
                    run(engine, batch, 32, args.prompt_tokens, temperature)
                parts = "  ".join(f"{1e3 * statistics.median(spent[p]):8.2f}" for p in PARTS)
                print(
                    f"{k:2d} {batch:5d} {temperature:4.1f} {rate:9.1f}"
                    f"  {accepted / max(1, drafted):8.3f}  {step_ms:7.2f}  {floor_ms:8.2f}"
                    f"  | {'':22} {parts}",
                    flush=True,
                )
        del engine


if __name__ == "__main__":
    main()

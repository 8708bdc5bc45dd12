"""Whether greedy output is the same for every k, where the target's arithmetic can tell.

    python benchmarks/greedy_agreement.py TARGET DRAFT [--k 4 8] [--prompts 32] [--new-tokens 256]
        [--batch-invariant]

A batch of other rows rounds differently, so that two tokens whose logits lie closer together than
that noise may change places. As long as two outputs agree, both runs score the same prefixes: the
noise is how far they differ there in the best token's lead over the second. Exits with 1 if outputs
part at a token that leads by more; with --batch-invariant, if any part at all.
"""

import argparse
import sys

import torch

from outrider.engine.api import NewRequest, SamplingParams, TokenLogprobs
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine


def greedy(engine: Engine, k: int, prompts: list[list[int]], n: int) -> list[list[TokenLogprobs]]:
    """Of each prompt, its tokens and the two best at each, by logprob."""
    params = SamplingParams(
        max_tokens=n, temperature=0.0, logprobs=2, ignore_eos=True, num_speculative_tokens=k
    )
    engine.submit(
        [
            NewRequest(request_id=str(i), prompt_token_ids=prompt, params=params)
            for i, prompt in enumerate(prompts)
        ]
    )
    outputs: list[list[TokenLogprobs]] = [[] for _ in prompts]
    while engine.has_work():
        for output in engine.step():
            outputs[int(output.request_id)] += output.logprobs or []
    return outputs


def lead(logprobs: TokenLogprobs) -> float:
    return logprobs.top[0][1] - logprobs.top[1][1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--k", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batch-invariant", action="store_true", help="no output may part")
    args = parser.parse_args()
    longest = 20 + 3 * args.prompts + args.new_tokens + 4 * (max(args.k) + 1)
    engine = Engine(
        EngineConfig(
            target=ModelConfig(path=args.target, dtype=args.dtype),
            draft=ModelConfig(path=args.draft, dtype=args.dtype),
            device=args.device,
            batch_invariant=args.batch_invariant,
            max_model_len=longest,
            cache=CacheConfig(num_pages=1 + args.prompts * (longest // 16 + 1)),
            scheduler=SchedulerConfig(max_num_seqs=args.prompts, max_num_batched_tokens=4096),
            speculation=SpeculationConfig(num_speculative_tokens=max(args.k), adaptive=False),
        )
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(2, engine.info.vocab_size, (20 + 3 * i,), generator=generator).tolist()
        for i in range(args.prompts)
    ]
    plain = greedy(engine, 0, prompts, args.new_tokens)
    failed = False
    for k in args.k:
        noise = 0.0
        leads, parted = [], []
        for ours, theirs in zip(plain, greedy(engine, k, prompts, args.new_tokens), strict=True):
            for one, other in zip(ours, theirs, strict=True):
                leads.append(lead(one))
                if one.top[0][0] != other.top[0][0]:
                    parted.append(lead(one))
                    break
                if one.top[1][0] == other.top[1][0]:
                    noise = max(noise, abs(lead(one) - lead(other)))
        close = sum(gap <= noise for gap in leads) / len(leads)
        print(
            f"k = {k} against plain decoding: {len(leads)} tokens compared, noise {noise:.4f}; "
            f"{close:.2%} of the leads are within that; {len(parted)} of {len(prompts)} "
            f"outputs part, at leads of up to {max(parted, default=0):.4f}"
        )
        failed |= bool(parted) if args.batch_invariant else max(parted, default=0) > noise
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Where the time of one long prompt goes on a GPU, and which chunks it should be computed in.

    python benchmarks/prompt_parts.py [--tokens 16384] [--chunks 512,2048,8192,16384] [--layers 4]
        [--quantization fp8] [--cache-dtype fp8]

Layers of Qwen3-8B's shape with random weights. First, for each size of chunks, the milliseconds of
a layer for the whole prompt and tokens/s of 36 such layers; then, for the largest size, each
kernel's share of the time. Tokens/s leave out embeddings, the output layer and a head.
"""

import argparse
import re
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from random_model import VOCAB, save_random_model
from torch.profiler import ProfilerActivity, profile

from outrider.engine.config import ModelConfig
from outrider.engine.models.loading import load_network
from outrider.engine.models.network import Network
from outrider.engine.state.batch import HostBatch
from outrider.engine.state.slots import Slots

LAYERS_OF_8B = 36


@torch.inference_mode()
def run(network: Network, num_tokens: int, chunk: int) -> None:
    """The prompt in the first slot; its last row gets logits."""
    for first in range(0, num_tokens, chunk):
        rows = min(chunk, num_tokens - first)
        slot = np.zeros(1, dtype=np.int64)
        batch = HostBatch.build(slot, slot + first - num_tokens, slot + rows, slot + 1)
        network.forward(batch)


def time_ms(network: Network, num_tokens: int, chunk: int) -> float:
    run(network, num_tokens, chunk)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(2):
        run(network, num_tokens, chunk)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 2


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--chunks", type=numbers, default=[512, 2048, 8192, 16384])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--cache-dtype", choices=["fp8"])
    args = parser.parse_args()
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as path:
        save_random_model(Path(path), args.layers)
        network = load_network(
            ModelConfig(path=path, dtype="bfloat16", quantization=args.quantization),
            device,
            batch_invariant=True,
            cache_dtype=torch.float8_e4m3fn if args.cache_dtype else None,
        )
    slots = Slots(1, args.tokens + 16, 0, 16, device, VOCAB)
    network.bind_slots(slots)
    num_pages = args.tokens // 16 + 2
    network.bind_cache(num_pages, 16)
    slots.block_tables[0, 0, : num_pages - 1] = torch.arange(1, num_pages, device=device).int()
    slots.token_ids[0, : args.tokens] = torch.randint(VOCAB, (args.tokens,), device=device).int()
    slots.num_tokens[0] = args.tokens
    for chunk in args.chunks:
        ms = time_ms(network, args.tokens, chunk) / args.layers
        per_s = args.tokens / (ms * LAYERS_OF_8B) * 1e3
        print(f"chunks of {chunk:>6}: {ms:8.3f} ms a layer, {per_s:10,.0f} tokens/s", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(network, args.tokens, max(args.chunks))
        torch.cuda.synchronize()
    spent, calls = Counter[str](), Counter[str]()
    for event in profiled.events() or []:
        name = re.sub(r"<.*|\(.*", "", event.name)[:60]
        spent[name] += event.device_time_total / 1e3
        calls[name] += 1
    total = sum(spent.values())
    print(f"kernels of one prompt in chunks of {max(args.chunks)}: {total:.1f} ms")
    for name, ms in spent.most_common(14):
        share = ms / total
        print(f"{name:<60} {ms / args.layers:8.3f} ms a layer {share:6.1%} {calls[name]:>5} calls")


if __name__ == "__main__":
    main()

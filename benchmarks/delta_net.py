"""Time a delta net's way through its states, beside the time that their bytes take.

    python benchmarks/delta_net.py [--key-heads 16] [--value-heads 48] [--drafts 3]

Microseconds a layer, medians of CUDA-graph replays. Each sequence has 1 + drafts rows, behind a
pass whose drafts were all accepted. The floor is each state read and written once, at --tb-per-s.
The last lines are prompts: one sequence with so many rows.
"""

import argparse
from functools import partial

import torch

from kernels import DEVICE, time_us
from outrider.kernels.model import delta_net as module
from outrider.kernels.model.delta_net import DeltaHeads, DeltaMemory, DeltaWeights, delta_net
from outrider.kernels.model.rows import BatchRows

TAPS = 4
BATCHES = (1, 8, 32, 64)
PROMPTS = (512, 4096)
POSITION = 100  # of each sequence's first row


def make_rows(num_seqs: int, num_rows: int) -> BatchRows:
    unused = torch.empty(0, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(num_seqs, device=DEVICE)
    bounds = num_rows * torch.arange(num_seqs + 1, device=DEVICE)
    return BatchRows(
        unused, unused, unused, slots, torch.full_like(slots, POSITION + num_rows), bounds
    )


def time_pass(heads: DeltaHeads, num_seqs: int, num_rows: int, num_drafts: int) -> float:
    """Of `num_rows` rows a sequence, the last `num_drafts` of them drafts."""
    x = torch.randn(num_seqs * num_rows, heads.row_width, device=DEVICE).bfloat16()
    weights = DeltaWeights(
        torch.randn(heads.num_channels, TAPS, device=DEVICE).bfloat16(),
        torch.zeros(heads.num_value_heads, device=DEVICE),
        torch.zeros(heads.num_value_heads, device=DEVICE),
    )
    state = num_seqs, heads.num_value_heads, heads.key_dim, heads.value_dim
    ring = num_seqs, TAPS - 1 + num_drafts, heads.row_width
    memory = DeltaMemory(
        torch.zeros(state, device=DEVICE),
        torch.randn(ring, device=DEVICE).bfloat16(),
        torch.empty(num_seqs, dtype=torch.int64, device=DEVICE),
    )
    num_tokens = torch.full((num_seqs,), POSITION + num_rows - num_drafts, device=DEVICE)
    rows, covered = make_rows(num_seqs, num_rows), POSITION - num_drafts

    def run() -> None:
        memory.num_rows.fill_(covered)
        delta_net(x, heads, weights, memory, rows, num_tokens)

    return time_us([partial(run)], replays=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=48)
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--columns", type=int, nargs="+", default=[module._BLOCK_V], help="tried")
    parser.add_argument("--tb-per-s", type=float, default=4.3)
    args = parser.parse_args()
    heads = DeltaHeads(args.key_heads, args.value_heads, args.dim, args.dim)
    columns = "".join(f"{f'{each} columns':>14}" for each in args.columns)
    print(f"{'sequences':>9}{'rows':>6}{'floor':>8}{columns}")
    passes = [(batch, k + 1, k) for batch in BATCHES for k in (0, args.drafts)]
    for num_seqs, num_rows, num_drafts in [*passes, *((1, rows, 0) for rows in PROMPTS)]:
        num_bytes = 8 * num_seqs * heads.num_value_heads * heads.key_dim * heads.value_dim
        line = f"{num_seqs:9d}{num_rows:6d}{num_bytes / args.tb_per_s / 1e6:8.1f}"
        for each in args.columns:
            module._BLOCK_V = each
            line += f"{time_pass(heads, num_seqs, num_rows, num_drafts):14.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()

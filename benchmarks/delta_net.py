"""Time a delta net, or Mamba2, beside the time that the bytes of its states take.

    python benchmarks/delta_net.py [--key-heads 16] [--value-heads 48]
    python benchmarks/delta_net.py --mamba2 --key-heads 8 --value-heads 64 --value-dim 64

Microseconds a layer, medians of CUDA-graph replays. Of each sequence's rows all but the first are
drafts, behind a pass whose drafts were all accepted. A state is read in each pass, and written in
those that complete a cell of 16 rows: "edge". The floor is each state read once, at --tb-per-s. The
last lines are prompts: one sequence with so many rows, from position 0 on. First the outputs are
compared with the reference's.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from kernels import DEVICE, time_us
from outrider.kernels.model.delta_net import delta_net, delta_net_reference
from outrider.kernels.model.mamba2 import mamba2, mamba2_reference
from outrider.kernels.model.rows import BatchRows
from outrider.kernels.model.state_cells import CELL
from outrider.kernels.model.state_layer import StateHeads, StateMemory, StateWeights, rows_kept

TAPS = 4
MOST_DRAFTS = 7
BATCHES = (1, 8, 64)
ROWS = (1, 4, 8)
PROMPTS = (512, 4096, 16384)
INSIDE, AT_EDGE = 6 * CELL + CELL // 2, 7 * CELL - 1  # positions of first rows


def make_rows(num_seqs: int, num_rows: int, position: int) -> BatchRows:
    unused = torch.empty(0, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(num_seqs, device=DEVICE)
    bounds = num_rows * torch.arange(num_seqs + 1, device=DEVICE)
    return BatchRows(
        unused, unused, unused, slots, torch.full_like(slots, position + num_rows), bounds
    )


def make_pass(
    heads: StateHeads,
    num_seqs: int,
    num_rows: int,
    num_drafts: int,
    position: int,
    implementation: Callable[..., torch.Tensor],
) -> Callable[[], torch.Tensor]:
    """A pass of `num_rows` rows a sequence, the last `num_drafts` of them drafts."""
    torch.manual_seed(0)
    x = torch.randn(num_seqs * num_rows, heads.row_width, device=DEVICE).bfloat16()
    weights = StateWeights(
        torch.randn(TAPS, heads.num_channels, device=DEVICE).bfloat16().t(),
        torch.zeros(heads.num_value_heads, device=DEVICE),
        torch.zeros(heads.num_value_heads, device=DEVICE),
    )
    if heads.num_scalars == 1:
        skip = torch.ones(heads.num_value_heads, device=DEVICE)
        weights = weights._replace(bias=torch.zeros_like(weights.convolution[:, 0]), skip=skip)
    state = num_seqs, heads.num_value_heads, heads.key_dim, heads.value_dim
    ring = num_seqs, rows_kept(TAPS, MOST_DRAFTS), heads.row_width
    memory = StateMemory(
        torch.zeros(state, device=DEVICE),
        torch.randn(ring, device=DEVICE).bfloat16(),
        torch.empty(num_seqs, dtype=torch.int64, device=DEVICE),
    )
    num_tokens = torch.full((num_seqs,), position + num_rows - num_drafts, device=DEVICE)
    rows = make_rows(num_seqs, num_rows, position)

    def run() -> torch.Tensor:
        memory.num_rows.fill_(position // CELL * CELL)
        parts = x.tensor_split([heads.num_channels], 1)
        return implementation(*parts, heads, weights, memory, rows, num_tokens)

    return run


def time_pass(*args: object) -> float:
    return time_us([make_pass(*args)], replays=7)  # type: ignore[arg-type]


def compare(heads: StateHeads, both: tuple[Callable[..., torch.Tensor], ...]) -> None:
    ours, expected = (make_pass(heads, 2, 300, 0, 0, each)().float() for each in both)
    error = (ours - expected).norm() / expected.norm()
    print(f"relative difference of 300 rows: {error:.1e} (rounding to bfloat16: about 2e-03)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=48)
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--value-dim", type=int, help="of a value head, if that is another")
    parser.add_argument("--mamba2", action="store_true", help="in place of a delta net")
    parser.add_argument("--tb-per-s", type=float, default=4.3)
    args = parser.parse_args()
    both = (mamba2, mamba2_reference) if args.mamba2 else (delta_net, delta_net_reference)
    heads = StateHeads(
        args.key_heads,
        args.value_heads,
        args.dim,
        args.value_dim or args.dim,
        num_scalars=1 if args.mamba2 else 2,
    )
    compare(heads, both)
    print(f"{'sequences':>9}{'rows':>6}{'floor':>8}{'inside':>8}{'edge':>8}")
    passes = [(batch, rows, rows - 1) for batch in BATCHES for rows in ROWS]
    for num_seqs, num_rows, num_drafts in [*passes, *((1, rows, 0) for rows in PROMPTS)]:
        is_prompt = num_rows in PROMPTS
        num_bytes = 4 * num_seqs * heads.num_value_heads * heads.key_dim * heads.value_dim
        line = f"{num_seqs:9d}{num_rows:6d}{num_bytes / args.tb_per_s / 1e6:8.1f}"
        timed = partial(time_pass, heads, num_seqs, num_rows, num_drafts)
        line += f"{timed(0 if is_prompt else INSIDE, both[0]):8.1f}"
        line += "" if is_prompt else f"{timed(AT_EDGE, both[0]):8.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()

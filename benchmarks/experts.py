"""Time the experts of a layer, in any format, beside the time that their bytes take.

    python benchmarks/experts.py [--experts 32] [--top-k 4] [--hidden 2880] [--intermediate 2880]
        [--format mxfp4|plain|fp8|fp8-blocks|int4]

Microseconds, medians of CUDA-graph replays over batches whose experts together do not fit the L2
cache. The floor is the bytes of the experts that some row takes, at --tb-per-s.
"""

import argparse
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import DEVICE, time_us
from outrider.kernels.model.block_scaled_experts import TiledRows, tiled_parts
from outrider.kernels.model.expert_matrix import SILU, ExpertMatrix, Glu, row_format_of
from outrider.kernels.model.experts import PairRows, add_experts, expert_activations
from outrider.kernels.model.experts_product import experts_product
from outrider.kernels.model.narrow_matrix import Kind, NarrowMatrix, has_4_bits
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Router, Routing, route
from outrider.kernels.model.row_codes import Rows, as_wanted
from outrider.kernels.model.split_product import add_parts

ROWS = (1, 8, 32, 64, 256, 4096)
PARTS = ("route", "gate and up", "down", "sum, norm", "in all")
NUM_BATCHES = 8
# Kind, inputs and outputs that share a scale.
FORMATS: dict[str, tuple[Kind, int, int]] = {
    "fp8": ("fp8", 1 << 20, 1),
    "fp8-blocks": ("fp8", 128, 128),
    "int4": ("int4", 128, 1),
    "nvfp4": ("nvfp4", 16, 1),
}


def make_narrow(name: str, num_experts: int, num_out: int, num_in: int) -> ExpertMatrix:
    """Random codes, in any order of a row's bytes."""
    kind, group, rows = FORMATS[name]
    num_rows, group = num_experts * num_out, min(group, num_in)
    width = num_in // 2 if has_4_bits(kind) else num_in
    codes = torch.randint(0, 126, (num_rows, width), dtype=torch.uint8, device=DEVICE)
    codes = codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.uint8)
    scale = torch.rand(num_in // group, num_rows // rows, device=DEVICE) / 100
    matrix = NarrowMatrix(kind, codes, scale.bfloat16(), None, num_in, group, rows)
    matrix = matrix._replace(rounds_inputs=name == "fp8-blocks")
    if kind == "nvfp4":
        factor = torch.ones(num_rows, device=DEVICE)
        shape = num_in // 64, num_rows, 4
        four = torch.randint(8, 100, shape, dtype=torch.uint8, device=DEVICE).view(torch.int32)
        matrix = matrix._replace(scale=four[..., 0], factor=factor)
    return ExpertMatrix(matrix, None, num_experts)


def make_mxfp4(num_experts: int, num_out: int, num_in: int) -> ExpertMatrix:
    rows = num_experts * num_out
    codes = torch.randint(0, 256, (rows, num_in // 2), dtype=torch.uint8, device=DEVICE)
    exponent = torch.randint(118, 123, (num_in // 32, rows), dtype=torch.uint8, device=DEVICE)
    scale = exponent.view(torch.float8_e8m0fnu)
    matrix = NarrowMatrix("fp4", codes, scale, None, num_in, 32)
    return ExpertMatrix(matrix, torch.randn(rows, device=DEVICE).bfloat16(), num_experts)


def make_plain(num_experts: int, num_out: int, num_in: int) -> ExpertMatrix:
    matrix = torch.randn(num_experts * num_out, num_in, device=DEVICE, dtype=torch.bfloat16)
    return ExpertMatrix(matrix, None, num_experts)


class Experts(NamedTuple):
    first: ExpertMatrix
    down: ExpertMatrix
    glu: Glu


def make_experts(name: str, num_experts: int, hidden: int, intermediate: int) -> Experts:
    glu = Glu(1.702, 7.0, 1.0) if name == "mxfp4" else SILU
    whole = {"mxfp4": make_mxfp4, "plain": make_plain}
    make = whole[name] if name in whole else partial(make_narrow, name)
    first = make(num_experts, 2 * intermediate, hidden)
    return Experts(first, make(num_experts, hidden, intermediate), glu)


def make_logits(num_rows: int, num_experts: int, top_k: int) -> list[Tensor]:
    """Of each of some batches; one row's experts are others in every batch."""
    logits = torch.randn(NUM_BATCHES, num_rows, num_experts, device=DEVICE)
    for i, row in enumerate(logits[:, 0]):
        row[torch.arange(i * top_k, (i + 1) * top_k) % num_experts] += 20
    return list(logits.bfloat16())


def activations(x: Rows, routing: Routing, experts: Experts) -> PairRows:
    wanted = row_format_of(experts.down)
    return expert_activations(x, routing, experts.first, experts.glu, wanted)


def run_layer(
    residual: Tensor, x: Rows, logits: Tensor, top_k: int, experts: Experts, norm: Norm
) -> None:
    routing = route(logits, Router(top_k))
    gated = activations(x, routing, experts)
    add_experts(residual, gated, routing, experts.down, norm)


def parts_of(inner: PairRows, routing: Routing, down: ExpertMatrix) -> Tensor:
    """As `add_experts` adds them; rounding is a part of it."""
    if isinstance(inner, TiledRows):
        return tiled_parts(inner, routing, down)
    return experts_product(as_wanted(inner, row_format_of(down)), routing, down, None)


def time_parts(experts: Experts, num_rows: int, top_k: int, tb_per_s: float) -> list[float]:
    """The floor, then the time of each of PARTS."""
    num_experts, hidden = experts.down.num_experts, experts.down.num_out
    logits = make_logits(num_rows, num_experts, top_k)
    x = torch.randn(num_rows, hidden, device=DEVICE).bfloat16()
    rows = as_wanted(x, row_format_of(experts.first))  # as the norm in front gives them
    residual = torch.zeros_like(x)
    norm = Norm(torch.ones(hidden, device=DEVICE).bfloat16(), 1e-5)
    routings = [route(each, Router(top_k)) for each in logits]
    gated = activations(rows, routings[0], experts)
    parts = parts_of(gated, routings[0], experts.down)
    calls = (
        [partial(route, each, Router(top_k)) for each in logits],
        [partial(activations, rows, each, experts) for each in routings],
        [partial(parts_of, gated, each, experts.down) for each in routings],
        [partial(add_parts, residual, parts, norm)],
        [partial(run_layer, residual, rows, each, top_k, experts, norm) for each in logits],
    )
    num_taken = sum(len(each.ids.unique()) for each in routings) / len(routings)
    num_bytes = (experts.first.num_bytes + experts.down.num_bytes) * num_taken / num_experts
    return [num_bytes / tb_per_s / 1e6, *(time_us(each, replays=7) for each in calls)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument("--intermediate", type=int, default=2880)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tb-per-s", type=float, default=4.3)
    parser.add_argument("--format", choices=["mxfp4", "plain", *FORMATS], default="mxfp4")
    args = parser.parse_args()
    experts = make_experts(args.format, args.experts, args.hidden, args.intermediate)
    print(f"{'rows':>5}" + "".join(f"{name:>13}" for name in ("floor", *PARTS)))
    for num_rows in args.rows:
        times = time_parts(experts, num_rows, args.top_k, args.tb_per_s)
        print(f"{num_rows:5d}" + "".join(f"{time:13.1f}" for time in times), flush=True)


if __name__ == "__main__":
    main()

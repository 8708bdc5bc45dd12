"""Time the linear layers of a model's shape in each format, beside the time that their bytes take.

    python benchmarks/products.py [--hidden 4096] [--intermediate 12288] [--heads 32] [--kv-heads 8]

Microseconds, medians of CUDA-graph replays over as many matrices as do not fit the L2 cache. Behind
the layers that are added to the residual stands the norm of the sum, where few rows take it along.
The floor is the weights' bytes at --tb-per-s.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels import DEVICE, L2_BYTES, time_us
from outrider.kernels.model.linear import add_linear, linear
from outrider.kernels.model.narrow_linear import add_narrow_linear, narrow_linear
from outrider.kernels.model.narrow_matrix import NarrowMatrix, narrow_matrix, round_to_fp8
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.scaled_linear import add_scaled_linear, scaled_linear

ROWS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)


def plain(num_out: int, num_in: int) -> Tensor:
    return torch.randn(num_out, num_in, device=DEVICE).mul_(0.02).bfloat16()


def int4(num_out: int, num_in: int) -> NarrowMatrix:
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(num_in // 128, num_out, device=DEVICE).half()
    return narrow_matrix("int4", codes, scale, group=128)


def nvfp4(num_out: int, num_in: int) -> NarrowMatrix:
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(num_in // 16, num_out, device=DEVICE).to(torch.float8_e4m3fn)
    factor = torch.rand(num_out, device=DEVICE)
    return narrow_matrix("nvfp4", codes, scale, group=16, factor=factor)


def fp8_blocks(num_out: int, num_in: int, *, rounds_inputs: bool = False) -> NarrowMatrix:
    codes = plain(num_out, num_in).to(torch.float8_e4m3fn)
    scale = torch.rand(num_in // 128, num_out // 128, device=DEVICE)
    return narrow_matrix("fp8", codes, scale, group=128, rows=128, rounds_inputs=rounds_inputs)


MAKERS: dict[str, Callable[[int, int], Tensor | NarrowMatrix]] = {
    "bfloat16": plain,
    "fp8": lambda num_out, num_in: round_to_fp8(plain(num_out, num_in)),
    "fp8 blocks": fp8_blocks,
    "w8a8 blocks": partial(fp8_blocks, rounds_inputs=True),
    "int4": int4,
    "nvfp4": nvfp4,
}


def num_bytes(matrix: Tensor | NarrowMatrix) -> int:
    return matrix.nbytes if isinstance(matrix, Tensor) else matrix.num_bytes


def call(
    matrix: Tensor | NarrowMatrix, x: Tensor, residual: Tensor, norm: Norm, layer: str
) -> object:
    multiply: Callable[..., Tensor] = narrow_linear
    add: Callable[..., object] = add_narrow_linear
    if isinstance(matrix, Tensor):
        multiply, add = linear, add_linear
    elif matrix.rounds_inputs:
        multiply, add = scaled_linear, add_scaled_linear
    if layer in ("output", "down"):
        return add(residual, x, matrix, norm=norm)
    return multiply(x, matrix, gated=layer == "gate_up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=12288)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--formats", nargs="+", default=list(MAKERS), choices=MAKERS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tb-per-s", type=float, default=4.3)
    args = parser.parse_args()
    query, kv = args.heads * args.head_dim, args.kv_heads * args.head_dim
    layers = {
        "qkv": (query + 2 * kv, args.hidden),
        "output": (args.hidden, query),
        "gate_up": (2 * args.intermediate, args.hidden),
        "down": (args.hidden, args.intermediate),
    }
    print(
        f"{'format':>11} {'rows':>5}  " + "  ".join(f"{layer:>14}" for layer in layers) + "   sum"
    )
    norm = Norm(torch.ones(args.hidden, dtype=torch.bfloat16, device=DEVICE), 1e-6)
    for name in args.formats:
        matrices = {}
        for layer, shape in layers.items():
            first = MAKERS[name](*shape)
            count = max(2, int(4 * L2_BYTES / num_bytes(first)) + 1)
            matrices[layer] = [first, *(MAKERS[name](*shape) for _ in range(count - 1))]
        for num_rows in args.rows:
            times, floors = [], []
            for layer, (_, num_in) in layers.items():
                x = torch.randn(num_rows, num_in, device=DEVICE).bfloat16()
                residual = torch.zeros(num_rows, args.hidden, device=DEVICE).bfloat16()
                calls = [
                    partial(call, matrix, x, residual, norm, layer) for matrix in matrices[layer]
                ]
                times.append(time_us(calls, replays=7))
                floors.append(num_bytes(matrices[layer][0]) / args.tb_per_s / 1e6)
            cells = (f"{t:7.1f} ({f:4.1f})" for t, f in zip(times, floors, strict=True))
            print(
                f"{name:>11} {num_rows:5d}  "
                + "  ".join(f"{cell:>14}" for cell in cells)
                + f"  {sum(times):6.1f} ({sum(floors):.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()

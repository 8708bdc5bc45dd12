"""What tests of few rows of experts on Hopper GPUs share."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from random_tensors import normals
from torch import Tensor

from outrider.kernels.model import experts_trial
from outrider.kernels.model.expert_matrix import ExpertMatrix, Glu, expert_of
from outrider.kernels.model.expert_tiles import ExpertTiles
from outrider.kernels.model.routing import Routing

EXPERTS, TOP_K = 5, 2
GLU = Glu(1.7, 2.0, 1.0)


def make_routing(num_rows: int, size: int, num_empty: int = 2) -> Routing:
    """The last expert has no row, and more rows take the first expert than the others."""
    randn = normals(7)
    logits, weights = randn(200, EXPERTS - 1), randn(200, TOP_K).abs()
    logits[:, 0] += 1
    ids = logits.topk(TOP_K).indices.int()[:num_rows].contiguous()
    return Routing(ids, weights[:num_rows].contiguous(), make_tiles(ids, size, num_empty))


def make_tiles(ids: Tensor, size: int, num_empty: int) -> ExpertTiles:
    """And so many that have no expert."""
    experts, pairs = [], []
    for expert in range(EXPERTS):
        for part in (ids.flatten() == expert).nonzero()[:, 0].split(size):
            if len(part):
                experts.append(expert)
                pairs.append(functional.pad(part, (0, size - len(part)), value=ids.numel()))
    experts += [EXPERTS] * num_empty
    pairs += [torch.full((size,), ids.numel(), device=ids.device)] * num_empty
    return ExpertTiles(torch.tensor(experts, device=ids.device).int(), torch.stack(pairs).int())


def exact(x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
    """Of each pair. Shape: [T * k, K] -> [T * k, N] float64"""
    y = x.new_empty(len(x), layer.num_out, dtype=torch.float64)
    for expert in range(EXPERTS):
        which = (routing.ids == expert).flatten()
        matrix, bias = expert_of(layer, expert, torch.float64)
        y[which] = x[which].double() @ matrix.t() + (0 if bias is None else bias.double())
    return y


def activations_of(x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
    """Those of each pair. Shape: [T, K] -> [T * k, N / 2] float64"""
    gate, up = exact(x.repeat_interleave(TOP_K, 0), routing, layer).chunk(2, 1)
    gate, up = gate.clamp(max=GLU.limit), up.clamp(-GLU.limit, GLU.limit)
    return (up + GLU.shift) * gate * torch.sigmoid(GLU.alpha * gate)


def parts_of(x: Tensor, routing: Routing, layer: ExpertMatrix) -> Tensor:
    """Outputs of each pair, times its weight. Shape: [T * k, K] -> [k, T, N] float64"""
    y = exact(x, routing, layer) * routing.weights.flatten()[:, None]
    return y.view(len(routing.ids), TOP_K, layer.num_out).transpose(0, 1)


def always_by(module: Any) -> Callable[..., Tensor]:
    """In place of `experts_product` in a trial: both ways by the kernel of `module`, since that for
    any GPU does not run here.
    """

    def multiply(
        x: Tensor, routing: Routing, layer: ExpertMatrix, glu: Glu | None, some: range | None = None
    ) -> Tensor:
        num_rows, top_k = routing.ids.shape
        num_out = experts_trial._NUM_OUT // (2 if glu else 1)
        if some is None:
            assert module.is_for(x, layer, routing, glu)
        else:
            assert some == range(num_out)
        out = x.new_empty((num_rows * top_k, num_out) if glu else (top_k, num_rows, num_out))
        module.few_rows_of_experts(out, x, routing, layer, glu)
        return out

    return multiply

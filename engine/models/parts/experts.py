"""An MLP of which each row takes a few experts, chosen by a router."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.expert_matrix import ExpertMatrix, Experts
from outrider.kernels.model.experts import add_experts
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.routing import Routing, route, routing_of
from outrider.kernels.model.row_codes import Normed

from ..attention import ForwardBatch
from ..weights import Linear, StoredWeights
from .base import Part


class ExpertWeights(StoredWeights):
    """The matrices of all experts of a layer, in MXFP4."""

    def __init__(
        self, gate_up: ExpertMatrix, down: ExpertMatrix, *, top_k: int, alpha: float, limit: float
    ) -> None:
        """Shape: gate_up [E, 2 I, hidden], the gate first; down [E, hidden, I]."""
        self.matrices = Experts(gate_up, down, alpha, limit)
        self.top_k = top_k
        self.num_bytes = (gate_up.num_bytes + down.num_bytes) * top_k // gate_up.num_experts
        self.format = gate_up.matrix.kind
        self.batch_invariant = uses_triton(down.bias)


@dataclass(slots=True)
class ExpertMLP(Part):
    """The sum over a row's experts of weight * down(glu(gate_up(x))); see `kernels/model/experts`.

    Padding rows are computed like the others, so their experts are read, too.
    """

    router: Linear
    experts: ExpertWeights
    chooser: str | None = None
    choice: Routing | None = None  # of all rows, if it is made already

    def __call__(
        self, x: Tensor, normed: Normed | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Normed | None:
        if normed is None:
            normed = rms_norm(x, self.norm)
        assert isinstance(normed, Tensor)
        routing = self.choice or route(self.router(normed), self.experts.top_k)
        return add_experts(x, normed, routing, self.experts.matrices, next_norm)

    @property
    def weights(self) -> tuple[StoredWeights, ...]:
        return self.router.weight, self.experts

    def chooses(self, *chosen: Tensor) -> bool:
        normed, logits, weights, ids = chosen
        eps, theirs = torch.finfo(logits.dtype).eps, logits.float()
        ours = self.router(normed).float()
        routing = route(logits, ids.shape[1])  # before a verdict: compiling launches both
        if not (ours - theirs).norm() <= 8 * eps * theirs.norm():
            return False
        # Of equal logits either may be chosen.
        best = [theirs.gather(1, each.long()) for each in (routing.ids, ids)]
        return torch.equal(*best) and torch.allclose(
            routing.weights, weights.float(), rtol=0, atol=4 * eps
        )

    def choosing(self, *chosen: Tensor) -> "ExpertMLP":
        _, logits, weights, ids = chosen
        choice = routing_of(ids.int(), weights.float().contiguous(), logits.shape[1])
        return replace(self, choice=choice)

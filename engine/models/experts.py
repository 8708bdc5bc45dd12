"""An MLP of which each row takes a few experts, chosen by a router."""

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.expert_matrix import ExpertMatrix, Experts
from outrider.kernels.model.experts import add_experts
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.routing import Routing, route
from outrider.kernels.model.row_codes import Normed

from .attention import ForwardBatch
from .weights import Linear, Part, StoredWeights


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

    norm: Norm
    router: Linear
    experts: ExpertWeights

    def __call__(
        self, x: Tensor, normed: Normed | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Normed | None:
        if normed is None:
            normed = rms_norm(x, self.norm)
        assert isinstance(normed, Tensor)
        routing = route(self.router(normed), self.experts.top_k)
        return self.add(x, normed, routing, next_norm)

    def add(
        self, x: Tensor, normed: Tensor, routing: Routing, next_norm: Norm | None = None
    ) -> Normed | None:
        """Add the output of experts that are chosen already."""
        return add_experts(x, normed, routing, self.experts.matrices, next_norm)

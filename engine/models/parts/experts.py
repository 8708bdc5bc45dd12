"""An MLP of which each row takes a few experts, chosen by a router."""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.model.expert_matrix import SILU, Activation, Glu
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import (
    Router,
    Routing,
    route,
    routing_of,
    scores_reference,
    with_shared,
)
from outrider.kernels.model.row_codes import Rows, normed_rows, plain
from outrider.kernels.model.sigmoid_gate import gate_heads

from ..admission import FinalRefusalError, UnsupportedModelError
from ..attention import ForwardBatch
from ..checkpoint import AnyCheckpoint
from ..expert_weights import ExpertWeights, SharedExpert, read_experts
from ..weights import Dense, Layer, Linear, Unrounded
from .base import Part
from .gated_mlp import GatedMLP
from .plain_mlp import PlainMLP


@dataclass(slots=True)
class ExpertMLP(Part):
    """The sum over a row's experts of weight * down(activation(first(x))); see
    `kernels/model/experts`.

    A shared expert, which all rows have, is stacked behind the others if their sizes and formats
    allow it. Otherwise it is an MLP by itself, with the same activation, which is added. It may be
    multiplied by a gate, the sigmoid of a further output of the router's layer. Padding rows have
    no experts of their own. Experts may compute in a smaller space, between two linear layers that
    all of them share.
    """

    router_layer: Linear  # an output for each expert that is chosen, and the gate's
    first: Layer[ExpertWeights]  # the gate's outputs, then those of `up`; or of `up` alone
    down: Layer[ExpertWeights]
    activation: Activation
    router: Router
    shared: GatedMLP | PlainMLP | None = None  # which is not stacked
    to_latent: Linear | None = None  # both, or none
    from_latent: Linear | None = None
    choice: Routing | None = None  # of all rows, if it is made already

    def __post_init__(self) -> None:
        if self.norm is not None and self.to_latent is None:
            norm = self.first.weight.before(self.norm)
            # The router, and a shared expert by itself, take the rows as they are.
            rounds = norm.rounds and norm.rounds._replace(keeps_rows=True)
            self.norm = norm._replace(rounds=rounds)

    @staticmethod
    def read(
        tensors: AnyCheckpoint,
        name: str,
        *,
        norm: Norm | None,
        width: int,
        inner: int,
        num_experts: int,
        router: Router,
        gate: str = "gate",
        exact: bool = False,
        shared: SharedExpert | None = None,
        activation: Activation = SILU,
        latent: tuple[int, str, str] | None = None,
    ) -> "ExpertMLP":
        """`inner`: outputs of an expert's `up`. `gate`: the router's name. `exact`: its logits are
        float32. `latent`: the size of the space in which they compute, and the names of the layers
        that lead there and back.

        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape, and
        UnsupportedModelError naming a format that is not served.
        """
        if reason := router.why_impossible(num_experts):
            raise FinalRefusalError(reason)
        logits = {f"{name}.{gate}": num_experts}
        if shared is not None and shared.gate is not None:
            logits[f"{name}.{shared.gate}"] = 1
            router = router._replace(gate=num_experts)
        router_layer = _read_router(tensors, width, logits, exact=exact)
        own_width, to_latent, from_latent = width, None, None
        if latent is not None:
            own_width, to, back = latent
            to_latent = tensors.linear(width, {f"{name}.{to}": own_width})
            from_latent = tensors.linear(own_width, {f"{name}.{back}": width})
        read = partial(read_experts, tensors, f"{name}.experts", num_experts=num_experts)
        has_gates = isinstance(activation, Glu)
        sizes = {"gate_proj": inner, "up_proj": inner} if has_gates else {"up_proj": inner}
        stored = "gate_up_proj" if has_gates else "up_proj"
        layers = [
            read(stored, sizes, num_inputs=own_width, axis="outputs"),
            read("down_proj", {"down_proj": own_width}, num_inputs=inner, axis="inputs"),
        ]
        further, mlp = None, None
        if shared is not None:
            # It computes on the rows themselves, also if others do so in a smaller space.
            further = shared.as_experts(tensors, width, *layers) if latent is None else None
            if further is None:
                mlp = _read_mlp(tensors, shared, width, activation)
            else:
                router = router._replace(num_shared=len(further[0].matrices))
        if biases := tensors.biases_left_out(f"{name}."):
            raise FinalRefusalError(f"its files have {biases[0]}; no mixture of its type has it")
        first, down = (
            layers.pop(0).stacked(tensors, router, shared_layer)
            for shared_layer in further or (None, None)
        )
        return ExpertMLP(
            norm=norm,
            router_layer=router_layer,
            first=first,
            down=down,
            activation=activation,
            router=router,
            chooser=f"{name}.{gate}",
            shared=mlp,
            to_latent=to_latent,
            from_latent=from_latent,
        )

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        if normed is None:
            normed = x if self.norm is None else normed_rows(x, self.norm)
        rows = plain(normed)
        logits = self.router_layer(rows)
        num_rows = batch.rows.cu_seqlens_q[-1:]
        routing = self.choice or route(logits, self.router, num_rows)
        if self.factor != 1:
            routing = routing._replace(weights=routing.weights * self.factor)
        first, down = self.first, self.down
        given = normed if self.to_latent is None else self.to_latent(rows)
        inner = first.weight.activations(
            given, routing, first.bias, self.activation, down.weight.row_format
        )
        if self.shared is not None:
            y, last = self.shared.activations(rows), self.shared.down
            gated: Rows = y
            if (gate := self.router.gate) is not None:
                of_rows = logits[:, gate : gate + 1, None]
                gated = gate_heads(y[:, None], of_rows, last.weight.row_format)
            self.add(x, last, gated, None)
        if self.from_latent is None:
            return down.weight.add_to(x, inner, routing, down.bias, next_norm)
        total = torch.zeros_like(plain(given))
        down.weight.add_to(total, inner, routing, down.bias, None)
        return self.from_latent.add_to(x, total, norm=next_norm)

    def chooses(self, *chosen: Tensor) -> bool:
        """The same experts as that module, except between those that are equally good to it."""
        normed, logits, weights, ids = _in_order(*chosen)
        ours, theirs = self.router_layer(normed), logits.float()
        eps, num_experts = torch.finfo(ours.dtype).eps, logits.shape[1]
        gated = torch.cat((logits, ours[:, num_experts:].to(logits.dtype)), 1)
        routing = route(gated, self.router)  # before a verdict: compiling launches both
        if not (ours[:, :num_experts].float() - theirs).norm() <= 8 * eps * theirs.norm():
            return False
        taken, shares, best = [], [], []
        scores = scores_reference(gated, self.router)
        chosen_here = (each[:, : self.router.top_k] for each in routing[:2])
        for experts, share in (chosen_here, (ids, weights)):
            experts = experts.long()
            none = torch.zeros_like(theirs)
            shares.append(none.scatter(1, experts, share.float()))
            taken.append(none.scatter(1, experts, 1.0))
            best.append(scores.gather(1, experts).sort(1, descending=True).values)
        # Of equal scores either may be chosen. Those of sigmoids and groups are rounded first.
        slack = 8 * torch.finfo(torch.float32).eps if self.router.sigmoid else 0
        are_equal = ((best[0] - best[1]).abs() <= slack).all(1)
        are_close = torch.isclose(shares[0], shares[1], rtol=4 * eps, atol=4 * eps).all(1)
        is_same = (taken[0] == taken[1]).all(1)
        return bool(torch.where(is_same, are_close, are_equal).all())

    def choosing(self, *chosen: Tensor) -> "ExpertMLP":
        normed, logits, weights, ids = _in_order(*chosen)
        ours = self.router_layer(normed)  # the gate is no choice
        ids, weights = with_shared(ids.int(), weights.float(), ours, self.router)
        choice = routing_of(ids, weights, logits.shape[1], self.router.num_shared)
        return replace(self, choice=choice)


def _read_router(
    tensors: AnyCheckpoint, width: int, logits: dict[str, int], *, exact: bool
) -> Linear:
    """By name, the layers that give so many logits: of the experts, and of a shared one's gate.

    Raises UnsupportedModelError if they must be exact and their format is not, or with a bias.
    """
    layer = tensors.linear(width, logits)
    if layer.bias is not None and layer.bias.any():
        name = next(name for name in logits if f"{name}.bias" in tensors)
        raise FinalRefusalError(f"its files have {name}.bias; no router of its type has it")
    if len(logits) > 1 and isinstance(layer.weight, Dense):
        # Followed by zeros: kernels read and write rows of a multiple of 16 numbers faster.
        matrix = layer.weight.matrix
        layer = layer._replace(weight=Dense(F.pad(matrix, (0, 0, 0, -len(matrix) % 16))))
    if exact:
        if not isinstance(layer.weight, Dense):
            raise UnsupportedModelError(f"its router is in {layer.weight.format}")
        layer = layer._replace(weight=Unrounded(layer.weight.matrix))
    return layer


def _read_mlp(
    tensors: AnyCheckpoint, shared: SharedExpert, width: int, activation: Activation
) -> GatedMLP | PlainMLP:
    """A shared expert by itself. Raises as GatedMLP.read does."""
    name, inner = shared.name, shared.inner
    if not isinstance(activation, Glu):
        return PlainMLP.read(tensors, name, norm=None, width=width, inner=inner)
    fused, down = shared.fused, shared.down
    return GatedMLP.read(tensors, name, norm=None, width=width, inner=inner, fused=fused, down=down)


def _in_order(
    normed: Tensor, logits: Tensor, weights: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a router reads and gives; in transformers 5.17, Granite's gives the ids first."""
    if not logits.is_floating_point():
        logits, ids = ids, logits
    return normed, logits, weights, ids

"""An MLP of which each row takes a few experts, chosen by a router."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.expert_matrix import (
    SILU,
    Activation,
    ExpertMatrix,
    Glu,
    layers_in_first,
    part_of,
)
from outrider.kernels.model.experts import (
    ExpertProduct,
    activations_by_expert,
    add_by_expert,
    add_experts,
    expert_activations,
)
from outrider.kernels.model.narrow_matrix import NarrowMatrix, dequantise, stack
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.routing import Router, Routing, route, routing_of, scores_reference
from outrider.kernels.model.row_codes import Rows
from outrider.kernels.model.sigmoid_gate import gate_rows

from ..admission import UnsupportedModelError
from ..attention import ForwardBatch
from ..checkpoint import AnyCheckpoint, Lent
from ..narrow_weight import Narrow
from ..shares import Cut, Outputs, Section
from ..weights import Axis, Dense, Layer, Linear, Matrix, Unrounded, Weight
from .base import Part
from .gated_mlp import GatedMLP
from .plain_mlp import PlainMLP


class ExpertWeights(Weight):
    """The matrices of all experts, [E N, K], of which a row takes those that it is routed to."""

    @abstractmethod
    def activations(
        self, x: Tensor, routing: Routing, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        """As `expert_activations`."""

    @abstractmethod
    def add_to(
        self, x: Tensor, inner: Tensor, routing: Routing, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        """As `add_experts`. Shape: x [T, N], inner [T * k, K]."""

    def as_batch_invariant(self, bias: Tensor | None) -> "ExpertWeights":
        return self  # each row is summed in one order anyway


class StackedExperts(ExpertWeights):
    """Matrices in one tensor, for our kernels: plain, or in 4 or 8 bits."""

    batch_invariant = True

    def __init__(
        self, matrix: Tensor | NarrowMatrix, num_experts: int, top_k: int, dtype: torch.dtype
    ) -> None:
        self._matrix, self._num_experts, self._dtype = matrix, num_experts, dtype
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.num_bytes = self._with(None).num_bytes * top_k // num_experts
        self.format = matrix.kind if isinstance(matrix, NarrowMatrix) else ""

    def _with(self, bias: Tensor | None) -> ExpertMatrix:
        return ExpertMatrix(self._matrix, bias, self._num_experts)

    def activations(
        self, x: Tensor, routing: Routing, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        return expert_activations(x, routing, self._with(bias), activation)

    def add_to(
        self, x: Tensor, inner: Tensor, routing: Routing, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        return add_experts(x, inner, routing, self._with(bias), norm)

    def dequantised(self) -> Tensor:
        matrix = self._matrix
        return dequantise(matrix, self._dtype) if isinstance(matrix, NarrowMatrix) else matrix

    def packed(self, *, rounds: bool) -> ExpertWeights:
        return self


class SeparateExperts(ExpertWeights):
    """Matrices in any format, for a CPU: each expert that some row takes has its own product."""

    def __init__(self, weights: Sequence[Matrix], top_k: int) -> None:
        self._weights, self._top_k = list(weights), top_k
        self.shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
        self.num_bytes = sum(weight.num_bytes for weight in weights) * top_k // len(weights)
        self.format = weights[0].format
        self.batch_invariant = all(weight.batch_invariant for weight in weights)
        self.input_eps = max(weight.input_eps for weight in weights)

    def _product(self, bias: Tensor | None) -> ExpertProduct:
        weights = self._weights
        biases = [None] * len(weights) if bias is None else bias.view(len(weights), -1)
        return lambda expert, rows: weights[expert].multiply(rows, biases[expert])

    def activations(
        self, x: Tensor, routing: Routing, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        num_out = self._weights[0].shape[0] // layers_in_first(activation)
        return activations_by_expert(x, routing, self._product(bias), num_out, activation)

    def add_to(
        self, x: Tensor, inner: Tensor, routing: Routing, bias: Tensor | None, norm: Norm | None
    ) -> None:
        add_by_expert(x, inner, routing, self._product(bias))

    def dequantised(self) -> Tensor:
        return torch.cat([weight.dequantised() for weight in self._weights])

    def packed(self, *, rounds: bool) -> ExpertWeights:
        each = [weight.packed(rounds=rounds) for weight in self._weights]
        return SeparateExperts(each, self._top_k)


def as_experts(
    matrix: Tensor | NarrowMatrix, num_experts: int, top_k: int, dtype: torch.dtype
) -> ExpertWeights:
    """Matrices in one tensor, as this device multiplies by them. Shape: [E N, K]."""
    if uses_triton(matrix if isinstance(matrix, Tensor) else matrix.codes):
        return StackedExperts(matrix, num_experts, top_k, dtype)
    parts = [part_of(matrix, i, num_experts) for i in range(num_experts)]
    return SeparateExperts(
        [Dense(part) if isinstance(part, Tensor) else Narrow(part, dtype) for part in parts], top_k
    )


def joined(weights: Sequence[Matrix], name: str) -> Tensor | NarrowMatrix:
    """The matrices of all experts in one tensor, as a kernel takes them.

    Raises UnsupportedModelError naming the experts if no kernel does.
    """
    dense = [weight.matrix for weight in weights if isinstance(weight, Dense)]
    if len(dense) == len(weights):
        return torch.cat(dense)
    narrow = [weight.matrix for weight in weights if isinstance(weight, Narrow)]
    matrix = stack(narrow) if len(narrow) == len(weights) else None
    if matrix is None:
        raise UnsupportedModelError(
            f"{name}: experts of one layer in several formats, or with inputs in several orders, "
            "are multiplied by on a CPU alone"
        )
    if matrix.order is not None:
        raise UnsupportedModelError(
            f"{name}: experts with inputs in an order of their own (act-order, desc_act) are "
            "multiplied by on a CPU alone"
        )
    return matrix


def read_experts(
    tensors: AnyCheckpoint,
    name: str,
    stored: str,
    sizes: dict[str, int],
    *,
    num_experts: int,
    num_inputs: int,
    top_k: int,
    axis: Axis,
) -> Layer[ExpertWeights]:
    """The layers `sizes` of all experts, stacked as `stored` or one by one, in any format.

    Their inputs are not rounded, whatever the format says: the bytes of weights take the time.
    Raises as AnyCheckpoint.linear does, and UnsupportedModelError if no kernel takes the matrices.
    """
    num_out, whole = sum(sizes.values()), f"{name}.{stored}"
    sections = tuple(map(Section, sizes.values()))
    parts: dict[str, Outputs] = dict(sizes)
    if tensors.stacks_layers(whole, num_experts):
        parts = {stored: sections}
    elif whole in tensors:
        cut = Cut(axis, sections if axis == "outputs" else (), lead=1)
        matrix = tensors.tensor(whole, num_experts, num_out, num_inputs, cut=cut).flatten(0, 1)
        return Layer(as_experts(matrix, num_experts, top_k, tensors.dtype), None, axis)
    each = [
        tensors.weight(
            num_inputs,
            {f"{name}.{i}.{part}": size for part, size in parts.items()},
            axis,
            rounds_inputs=False,
        )
        for i in range(num_experts)
    ]
    weights: ExpertWeights = SeparateExperts(each, top_k)
    if uses_triton(torch.empty(0, device=tensors.device)):
        weights = StackedExperts(joined(each, name), num_experts, top_k, tensors.dtype)
    shape = num_experts, num_out, num_inputs
    tensors.lent.append(Lent([whole], lambda: [weights.dequantised().view(shape)]))
    return Layer(weights, None, axis)


def _read_gate(tensors: AnyCheckpoint, name: str, width: int) -> Tensor:
    """The weights of a layer with one output, in any format, as a plain vector: [width].

    Raises as AnyCheckpoint.linear does.
    """
    weight = tensors.weight(width, {name: 1}, rounds_inputs=False).dequantised()
    tensors.tensors[f"{name}.weight"] = weight
    return weight[0]


@dataclass(slots=True)
class ExpertMLP(Part):
    """The sum over a row's experts of weight * down(activation(first(x))); see
    `kernels/model/experts`.

    A shared expert, which all rows have, is added to that: an MLP with the same activation, times
    sigmoid(shared_gate . x) if it is gated. Padding rows have no experts of their own. Experts may
    compute in a smaller space, between two linear layers that all of them share.
    """

    router_layer: Linear  # an output for each expert
    first: Layer[ExpertWeights]  # the gate's outputs, then those of `up`; or of `up` alone
    down: Layer[ExpertWeights]
    activation: Activation
    router: Router
    shared: GatedMLP | PlainMLP | None = None
    shared_gate: Tensor | None = None  # [hidden]; None: it is not gated
    to_latent: Linear | None = None  # both, or none
    from_latent: Linear | None = None
    choice: Routing | None = None  # of all rows, if it is made already

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
        shared: GatedMLP | PlainMLP | None = None,
        shared_gate: str | None = None,
        activation: Activation = SILU,
        latent: tuple[int, str, str] | None = None,
    ) -> "ExpertMLP":
        """`inner`: outputs of an expert's `up`. `gate`: the router's name. `exact`: its logits are
        float32. `shared`: the shared expert, without a norm; `shared_gate`: its gate's name.
        `latent`: the size of the space in which they compute, and the names of the layers that lead
        there and back.

        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape, and
        UnsupportedModelError naming a format that is not served.
        """
        if reason := router.why_impossible(num_experts):
            raise UnsupportedModelError(reason)
        read = partial(
            read_experts, tensors, f"{name}.experts", num_experts=num_experts, top_k=router.top_k
        )
        layer = tensors.linear(width, {f"{name}.{gate}": num_experts})
        if exact:
            if not isinstance(layer.weight, Dense):
                raise UnsupportedModelError(f"its router is in {layer.weight.format}")
            layer = layer._replace(weight=Unrounded(layer.weight.matrix))
        has_gates = isinstance(activation, Glu)
        sizes = {"gate_proj": inner, "up_proj": inner} if has_gates else {"up_proj": inner}
        stored = "gate_up_proj" if has_gates else "up_proj"
        gate_weight = None
        if shared_gate is not None:
            gate_weight = _read_gate(tensors, f"{name}.{shared_gate}", width)
        own_width, to_latent, from_latent = width, None, None
        if latent is not None:
            own_width, to, back = latent
            to_latent = tensors.linear(width, {f"{name}.{to}": own_width})
            from_latent = tensors.linear(own_width, {f"{name}.{back}": width})
        return ExpertMLP(
            norm=norm,
            router_layer=layer,
            first=read(stored, sizes, num_inputs=own_width, axis="outputs"),
            down=read("down_proj", {"down_proj": own_width}, num_inputs=inner, axis="inputs"),
            activation=activation,
            router=router,
            chooser=f"{name}.{gate}",
            shared=shared,
            shared_gate=gate_weight,
            to_latent=to_latent,
            from_latent=from_latent,
        )

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        if normed is None:
            normed = x if self.norm is None else rms_norm(x, self.norm)
        assert isinstance(normed, Tensor)
        logits = self.router_layer(normed)
        num_rows = batch.rows.cu_seqlens_q[-1:]
        routing = self.choice or route(logits, self.router, num_rows)
        if self.factor != 1:
            routing = routing._replace(weights=routing.weights * self.factor)
        first, down = self.first, self.down
        given = normed if self.to_latent is None else self.to_latent(normed)
        inner = first.weight.activations(given, routing, first.bias, self.activation)
        if self.shared is not None:
            shared = self.shared.activations(normed)
            if self.shared_gate is not None:
                gate_rows(shared, normed, self.shared_gate)
            self.shared.add(x, self.shared.down, shared, None)
        if self.from_latent is None:
            return down.weight.add_to(x, inner, routing, down.bias, next_norm)
        total = torch.zeros_like(given)
        down.weight.add_to(total, inner, routing, down.bias, None)
        return self.from_latent.add_to(x, total, norm=next_norm)

    def chooses(self, *chosen: Tensor) -> bool:
        """The same experts as that module, except between those that are equally good to it."""
        normed, logits, weights, ids = _in_order(*chosen)
        ours = self.router_layer(normed)
        eps, theirs = torch.finfo(ours.dtype).eps, logits.float()
        routing = route(logits, self.router)  # before a verdict: compiling launches both
        if not (ours.float() - theirs).norm() <= 8 * eps * theirs.norm():
            return False
        taken, shares, best = [], [], []
        scores = scores_reference(logits, self.router)
        for experts, share in ((routing.ids.long(), routing.weights), (ids.long(), weights)):
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
        _, logits, weights, ids = _in_order(*chosen)
        choice = routing_of(ids.int(), weights.float().contiguous(), logits.shape[1])
        return replace(self, choice=choice)


def _in_order(
    normed: Tensor, logits: Tensor, weights: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a router reads and gives; in transformers 5.17, Granite's gives the ids first."""
    if not logits.is_floating_point():
        logits, ids = ids, logits
    return normed, logits, weights, ids

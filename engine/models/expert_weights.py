"""The matrices of a mixture's experts, and how they are read from a checkpoint.

A shared expert, which every row takes, is stacked behind the others: as one of them or, if its
inner size is a multiple of theirs, as several, each with a range of its inner numbers. Their sum is
what it computes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.expert_matrix import (
    Activation,
    ExpertMatrix,
    is_mxfp4,
    layers_in_first,
    part_of,
    row_format_of,
)
from outrider.kernels.model.experts import (
    ExpertProduct,
    PairRows,
    activations_by_expert,
    add_by_expert,
    add_experts,
    expert_activations,
)
from outrider.kernels.model.experts_trial import try_few_rows_experts, try_mxfp4_few_rows
from outrider.kernels.model.narrow_matrix import (
    NarrowMatrix,
    RowFormat,
    can_stack,
    dequantise,
    stack,
)
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Router, Routing
from outrider.kernels.model.row_codes import Rows, plain
from outrider.kernels.model.scaled_trial import try_scaled_product

from .admission import UnsupportedModelError
from .checkpoint import AnyCheckpoint, Lent, check_shape
from .narrow_weight import Narrow, Scaled
from .shares import Cut, Outputs, Section, Share
from .weights import Axis, Dense, Layer, Matrix, RoundedInputs, Weight


class ExpertWeights(Weight):
    """The matrices of all experts, [E N, K], of which a row takes those that it is routed to.

    Their `input_eps` is twice that of other layers: what `down` takes is made within a module of
    transformers', where it is not rounded for a comparison.
    """

    @abstractmethod
    def activations(
        self,
        x: Rows,
        routing: Routing,
        bias: Tensor | None,
        activation: Activation,
        wanted: RowFormat | None,
    ) -> PairRows:
        """As `expert_activations`. Shape: x [T, K] -> [T * k, N] or, gated, [T * k, N / 2]."""

    @abstractmethod
    def add_to(
        self, x: Tensor, inner: PairRows, routing: Routing, bias: Tensor | None, norm: Norm | None
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
        if isinstance(matrix, NarrowMatrix) and matrix.rounds_inputs:
            # One after the other, as a program reads a block's.
            by_block = matrix.scale.t().clone(memory_format=torch.contiguous_format)
            matrix = matrix._replace(scale=by_block.t())
            try_scaled_product(matrix, dtype)
        elif isinstance(matrix, NarrowMatrix) and is_mxfp4(matrix):
            try_mxfp4_few_rows(matrix.codes.device, dtype)
        elif isinstance(matrix, Tensor):
            try_few_rows_experts(matrix.device, dtype)
        self._matrix, self._num_experts, self._dtype = matrix, num_experts, dtype
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.num_bytes = self._with(None).num_bytes * top_k // num_experts
        self.format = matrix.kind if isinstance(matrix, NarrowMatrix) else ""
        self.row_format = row_format_of(self._with(None))
        if self.row_format is not None:
            self.format, self.input_eps = f"{self.format} (inputs too)", 2 * Scaled.input_eps

    def _with(self, bias: Tensor | None) -> ExpertMatrix:
        return ExpertMatrix(self._matrix, bias, self._num_experts)

    def activations(
        self,
        x: Rows,
        routing: Routing,
        bias: Tensor | None,
        activation: Activation,
        wanted: RowFormat | None,
    ) -> PairRows:
        return expert_activations(x, routing, self._with(bias), activation, wanted)

    def add_to(
        self, x: Tensor, inner: PairRows, routing: Routing, bias: Tensor | None, norm: Norm | None
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
        self._given, self._top_k = list(weights), top_k
        rounding = [weight for weight in weights if isinstance(weight, RoundedInputs)]
        # A row that has several experts is rounded once.
        self._rounded = rounding[0] if len(rounding) == len(weights) else None
        self._weights = list(weights) if self._rounded is None else [w.weight for w in rounding]
        self.shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
        self.num_bytes = sum(weight.num_bytes for weight in weights) * top_k // len(weights)
        self.format = weights[0].format
        self.batch_invariant = all(weight.batch_invariant for weight in weights)
        self.input_eps = 2 * max(weight.input_eps for weight in weights)

    def _product(self, bias: Tensor | None) -> ExpertProduct:
        weights = self._weights
        biases = [None] * len(weights) if bias is None else bias.view(len(weights), -1)
        return lambda expert, rows: weights[expert].multiply(rows, biases[expert])

    def _taken(self, x: Tensor) -> Tensor:
        return x if self._rounded is None else self._rounded.taken(x, 0)

    def activations(
        self,
        x: Rows,
        routing: Routing,
        bias: Tensor | None,
        activation: Activation,
        wanted: RowFormat | None,
    ) -> PairRows:
        num_out = self._weights[0].shape[0] // layers_in_first(activation)
        x = self._taken(plain(x))
        return activations_by_expert(x, routing, self._product(bias), num_out, activation)

    def add_to(
        self, x: Tensor, inner: PairRows, routing: Routing, bias: Tensor | None, norm: Norm | None
    ) -> None:
        assert isinstance(inner, Tensor)
        add_by_expert(x, self._taken(inner), routing, self._product(bias))

    def dequantised(self) -> Tensor:
        return torch.cat([weight.dequantised() for weight in self._weights])

    def packed(self, *, rounds: bool) -> ExpertWeights:
        each = [weight.packed(rounds=rounds) for weight in self._given]
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


class ExpertLayer(NamedTuple):
    """The same linear layer of every expert, as it was read."""

    name: str  # of the parameter that transformers has of all
    matrices: list[Matrix]  # of each expert, or of all in one
    shape: tuple[int, int, int]  # [E, N, K]
    axis: Axis

    def stacked(
        self, tensors: AnyCheckpoint, router: Router, shared: "SharedLayer | None" = None
    ) -> Layer[ExpertWeights]:
        """As this device multiplies by it, with that of a shared expert behind the others.

        Raises UnsupportedModelError if no kernel does.
        """
        num_experts, num_out, num_in = self.shape
        num_all, num_taken = num_experts + router.num_shared, router.top_k + router.num_shared
        matrices, names, cut = self.matrices, [self.name], None
        if shared is not None:
            matrices, names, cut = matrices + shared.matrices, names + shared.names, shared.cut
        weights: ExpertWeights
        if _has_kernels(tensors):
            matrix = joined(matrices, self.name.rpartition(".")[0])
            weights = StackedExperts(matrix, num_all, num_taken, tensors.dtype)
        else:
            weights = SeparateExperts(matrices, num_taken)

        def as_in_modules() -> list[Tensor]:
            each = weights.dequantised().view(num_all, num_out, num_in)
            own, others = each[:num_experts], each[num_experts:]
            return [own] if cut is None else [own, *_whole(others, cut, len(names) - 1)]

        def taken(x: Tensor, i: int) -> Tensor:
            if i == 0 and axis == "inputs":
                return x  # not what `down` takes, which that module makes
            return torch.cat([one.taken(part, 0) for part in x.split(num_in, 1)], 1)

        one, axis = matrices[0], self.axis
        inputs = taken if weights.input_eps > 0 else None
        tensors.lent.append(Lent(names, as_in_modules, inputs))
        return Layer(weights, None, self.axis)

    def takes(self, tensors: AnyCheckpoint, other: Matrix) -> bool:
        """Whether a matrix can be stacked behind these."""
        if not _has_kernels(tensors):
            return True  # each has its own product
        own = self.matrices[0]
        if isinstance(own, Narrow) and isinstance(other, Narrow):
            return can_stack(own.matrix, other.matrix)
        return isinstance(own, Dense) and isinstance(other, Dense)


class SharedLayer(NamedTuple):
    """A linear layer of a shared expert, cut along its inner numbers into those of experts."""

    names: list[str]  # of its parameters
    matrices: list[Matrix]  # [N, K] each
    cut: Cut


class SharedExpert(NamedTuple):
    """An MLP that every row takes, as a checkpoint has it."""

    name: str
    inner: int  # its inner numbers
    gate: str | None = None  # the layer whose sigmoid it is multiplied by
    fused: str | None = None  # the layer that its gate and `up` are, if they are one
    down: str = "down_proj"

    def as_experts(
        self, tensors: AnyCheckpoint, width: int, first: ExpertLayer, down: ExpertLayer
    ) -> tuple[SharedLayer, SharedLayer] | None:
        """Its layers as those of further experts, like these; None if sizes or formats differ.

        `width`: its outputs. Raises as AnyCheckpoint.linear does.
        """
        inner = down.shape[2]
        num_layers, (count, rest) = first.shape[1] // inner, divmod(self.inner, inner)
        sizes: dict[str, Outputs] = {
            f"{self.name}.{part}": self.inner for part in ("gate_proj", "up_proj")[-num_layers:]
        }
        if self.fused is not None:
            sizes = {f"{self.name}.{self.fused}": (Section(self.inner),) * num_layers}
        added = {f"{self.name}.{self.down}": width}
        has_biases = any(f"{name}.bias" in tensors for name in (*sizes, *added))
        if rest or has_biases:
            return None
        of_first = Cut("outputs", (Section(inner),) * num_layers)
        found = []
        for like, num_in, names, cut in (
            (first, width, sizes, of_first),
            (down, self.inner, added, Cut("inputs")),
        ):
            weight = tensors.weight(num_in, names, cut.axis, of_expert=True)
            matrices = _parts_of(weight, count, cut, tensors.dtype)
            if not matrices or not like.takes(tensors, matrices[0]):
                return None
            found.append(SharedLayer([f"{name}.weight" for name in names], matrices, cut))
        return found[0], found[1]


def _parts_of(weight: Matrix, count: int, cut: Cut, dtype: torch.dtype) -> list[Matrix] | None:
    """A matrix cut into several, as ranks would share it; None if its format cannot be cut."""
    if count == 1:
        return [weight]
    shares = [Share(i, count) for i in range(count)]
    if isinstance(weight, Dense):
        return [Dense(share.of(weight.matrix, cut).contiguous()) for share in shares]
    if not isinstance(weight, Narrow):
        return None
    try:
        return [Narrow(share.of_narrow(weight.matrix, cut), dtype) for share in shares]
    except ValueError:  # a scale would be cut
        return None


def _whole(parts: Tensor, cut: Cut, num_layers: int) -> list[Tensor]:
    """The layers that were cut so. Shape: [m, N, K]."""
    if cut.axis == "inputs":
        return [parts.transpose(0, 1).flatten(1)]
    of_sections = parts.unflatten(1, (len(cut.sections), -1)).transpose(0, 1)
    return list(of_sections.flatten(0, 2).chunk(num_layers))


def _has_kernels(tensors: AnyCheckpoint) -> bool:
    return uses_triton(torch.empty(0, device=tensors.device))


def joined(weights: Sequence[Matrix], name: str) -> Tensor | NarrowMatrix:
    """Matrices in one tensor, as a kernel takes them.

    Raises UnsupportedModelError naming the experts if no kernel does.
    """
    dense = [weight.matrix for weight in weights if isinstance(weight, Dense)]
    if len(dense) == len(weights):
        return dense[0] if len(dense) == 1 else torch.cat(dense)
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
    axis: Axis,
) -> ExpertLayer:
    """The layers `sizes` of all experts, stacked as `stored` or one by one, in any format.

    Raises as AnyCheckpoint.linear does.
    """
    num_out, whole = sum(sizes.values()), f"{name}.{stored}"
    sections = tuple(map(Section, sizes.values()))
    parts: dict[str, Outputs] = dict(sizes)
    matrices: list[Matrix]
    if whole in tensors and not tensors.stacks_layers(whole, num_experts):
        cut = Cut(axis, sections if axis == "outputs" else (), lead=1)
        matrix = tensors.stacked(whole, cuts=[cut])
        check_shape(whole, matrix.shape, (num_experts, num_out, num_inputs))
        num_parts = 1 if _has_kernels(tensors) else num_experts
        matrices = [Dense(part) for part in matrix.flatten(0, 1).chunk(num_parts)]
    else:
        if whole in tensors:
            parts = {stored: sections}
        matrices = [
            tensors.weight(
                num_inputs,
                {f"{name}.{i}.{part}": size for part, size in parts.items()},
                axis,
                of_expert=True,
            )
            for i in range(num_experts)
        ]
    return ExpertLayer(whole, matrices, (num_experts, num_out, num_inputs), axis)

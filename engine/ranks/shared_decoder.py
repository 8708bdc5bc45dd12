"""A decoder of which each rank computes a share.

Layers that are shared along their outputs need nothing: their outputs stay apart, as heads or as
inner numbers of an MLP. What is shared along its inputs gives every rank a part of each sum. These
parts are exchanged, and every rank adds them to its residual stream in the order of the ranks: so
all have the same bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.experts import PairRows
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Routing
from outrider.kernels.model.row_codes import Rows
from outrider.kernels.model.split_product import PeerParts, add_parts, add_parts_reference

from ..models.attention import ForwardBatch
from ..models.blocks import Block
from ..models.decoder import Decoder
from ..models.expert_weights import ExpertWeights
from ..models.network import Pass
from ..models.weights import Fused, Layer, Matrix, Weight
from ..state.phase import Phase, Shape
from .group import RankGroup
from .wire import Op

Send = Callable[[Op, Shape, np.ndarray], None]
CauseOf = Callable[[Exception], Exception]


class SharedDecoder(Decoder):
    """One rank's share of a decoder, which rank 0 runs on all ranks at once."""

    has_followers = True

    def __init__(
        self,
        decoder: Decoder,
        group: RankGroup,
        send: Send | None = None,
        cause_of: CauseOf = lambda error: error,
    ) -> None:
        """Take over a decoder of this rank's share, once the ranks have met.

        On rank 0, `send` reaches the others, and `cause_of` knows what made a pass fail.
        """
        vars(self).update(vars(decoder))
        self._group, self._send, self._cause_of = group, send, cause_of
        self.change_linears(self._summed)
        self.blocks = [
            Block(*(part.over_ranks(group) for part in block.parts)) for block in self.blocks
        ]

    def _summed(self, layer: Layer[Weight]) -> Layer[Weight]:
        if layer.axis != "inputs":
            return layer
        if isinstance(layer.weight, ExpertWeights):
            return layer._replace(weight=ExpertsOverRanks(layer.weight, self._group))
        assert isinstance(layer.weight, Matrix)
        return layer._replace(weight=SummedOverRanks(layer.weight, self._group))

    def tap(self, layers: Sequence[int]) -> None:
        super().tap(layers)
        if self._send is not None:  # which rows a pass leaves out depends on it
            self._send(Op.TAP, (), np.array(layers))

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies and self._send is not None:
            self._send(Op.COPY_STATES, (), np.array(copies))
        super().copy_states(copies)

    @functools.cached_property
    def phase(self) -> Phase[Pass]:
        phase: Phase[Pass]
        if self._send is None:
            phase = Phase(self.run, self.device, needs_all_graphs=True)
        else:
            phase = FollowedPhase(self.run, self.device, self._group, self._send, self._cause_of)
        self._group.exchanges_in(phase)
        return phase

    def run(self, packed: Tensor, shape: Shape) -> Pass:
        # Only the slots of rank 0 know how far sequences have come, and their tokens.
        self._group.begin_pass()
        self._group.broadcast(self._slots.num_tokens)
        return super().run(packed, shape)

    def own_ids(self, input_ids: Tensor) -> Tensor:
        """Those of rank 0."""
        own = super().own_ids(input_ids)
        self._group.broadcast(own)
        return own

    def __call__(self, batch: ForwardBatch) -> Pass:
        if self._group.rank == 0:
            return super().__call__(batch)
        x, _ = self.through_layers(self.embedded(self.own_ids(batch.input_ids)), batch)
        return Pass(x)


class FollowedPhase(Phase[Pass]):
    """A phase that all ranks run: whatever rank 0 does with it, it has the others do."""

    def __init__(
        self,
        body: Callable[[Tensor, Shape], Pass],
        device: torch.device,
        group: RankGroup,
        send: Send,
        cause_of: CauseOf,
    ) -> None:
        # The ranks meet in each pass: no one may leave out what the others capture.
        super().__init__(body, device, needs_all_graphs=True)
        self._group, self._send, self._cause_of = group, send, cause_of

    def __call__(self, integers: np.ndarray | Tensor, shape: Shape, *tensors: Tensor) -> Pass:
        assert isinstance(integers, np.ndarray), "the others get what the host knows"
        if not self._group.is_apart:
            self._send(Op.RUN, shape, integers)
        try:
            return super().__call__(integers, shape, *tensors)
        except RuntimeError as error:  # of gloo, for example
            raise self._cause_of(error) from error

    def capture(
        self, integers_np: np.ndarray, shape: Shape, tensors: Sequence[Tensor] = ()
    ) -> None:
        self._send(Op.CAPTURE, shape, integers_np)
        super().capture(integers_np, shape, tensors)


class _OverRanks(Weight):
    """A weight of which each rank has a range of inputs, so that its products are parts of sums."""

    def __init__(self, weight: Any, group: RankGroup) -> None:
        self._weight, self._group = weight, group  # of the same kind
        self.shape, self.num_bytes = weight.shape, weight.num_bytes
        self.format, self.input_eps = weight.format, weight.input_eps
        self.batch_invariant, self.row_format = weight.batch_invariant, weight.row_format

    def dequantised(self) -> Tensor:
        """Of this rank alone."""
        own: Tensor = self._weight.dequantised()
        return own


class SummedOverRanks(_OverRanks, Matrix):
    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        assert not fused, "sums over ranks are only added"
        rows = x if isinstance(x, Tensor) else x.codes
        out = torch.zeros(len(rows), self.shape[0], dtype=x.dtype, device=rows.device)
        self.add_to(out, x, bias, None)
        return out

    def add_to(
        self, residual: Tensor, x: Rows, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        parts = self._group.parts(residual, lambda out: self._weight.multiply(x, None, out=out))
        return _add(residual, parts, bias, norm)


class ExpertsOverRanks(_OverRanks, ExpertWeights):
    """All ranks do the same for a row, whichever experts it takes, and a rank adds its part of all
    of them in one sum.
    """

    def activations(self, *_: object) -> PairRows:
        raise TypeError("the first layer of experts is shared by its outputs")

    def add_to(
        self, x: Tensor, inner: PairRows, routing: Routing, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        def compute(out: Tensor | None) -> Tensor:
            part = torch.zeros_like(x) if out is None else out.zero_()
            self._weight.add_to(part, inner, routing, bias, None)
            return part

        return _add(x, self._group.parts(x, compute), None, norm)

    def packed(self, *, rounds: bool) -> ExpertWeights:
        return self


def _add(
    residual: Tensor, parts: Tensor | PeerParts, bias: Tensor | None, norm: Norm | None
) -> Rows | None:
    """Add the parts of all ranks, in their order, and then the bias. Shape: [T, N] each."""
    if isinstance(parts, PeerParts) or uses_triton(residual):
        return add_parts(residual, parts, norm, bias)
    add_parts_reference(residual, parts, bias)
    return None

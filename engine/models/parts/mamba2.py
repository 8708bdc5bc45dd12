"""Mamba2: it looks at other tokens through a state of one size, not through their KV."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.model.gated_norm import gated_norm
from outrider.kernels.model.mamba2 import mamba2
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.row_codes import Rows
from outrider.kernels.model.state_layer import StateHeads, StateWeights

from ..attention import ForwardBatch
from ..checkpoint import AnyCheckpoint
from ..shares import Cut, Section
from .head_states import HeadStates, StatePart


@dataclass(slots=True)
class Mamba2(StatePart):
    """output(norm(mamba2(v, k, q, dt) silu(z))),  z, v, k, q, dt = inputs(norm(x))."""

    @staticmethod
    def why_impossible(
        heads: int, groups: int, time_step_limit: Sequence[float] | None
    ) -> str | None:
        """Why no layer has these; None if one can."""
        if (limit := tuple(time_step_limit or ())) != (0, math.inf):
            return f"its time steps are limited to {limit}"
        if groups < 1 or heads % groups:
            return f"{heads} heads of Mamba2 cannot share {groups} groups"
        return None

    @staticmethod
    def read(
        tensors: AnyCheckpoint,
        name: str,
        *,
        norm: Norm,
        width: int,
        num_heads: int,
        num_groups: int,
        head_dim: int,
        state_size: int,
        num_taps: int,
        factor: float = 1.0,
    ) -> "Mamba2":
        """With a bias of the convolution if the checkpoint has one.

        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape.
        """
        heads = StateHeads(num_groups, num_heads, state_size, head_dim, num_scalars=1)
        num_values = num_heads * head_dim
        values, keys = Section(num_values), Section(heads.num_key_heads * heads.key_dim)
        channels = values, keys, keys
        of_channels, by_head = Cut("outputs", channels), Cut("outputs")

        def by_value_head(part: str) -> Tensor:
            return tensors.float32(f"{name}.{part}", heads.num_value_heads, cut=by_head)

        convolution = tensors.tensor(
            f"{name}.conv1d.weight", heads.num_channels, 1, num_taps, cut=of_channels
        )
        bias = None
        if f"{name}.conv1d.bias" in tensors:
            bias = tensors.tensor(f"{name}.conv1d.bias", heads.num_channels, cut=of_channels)
        gated_by = tensors.float32(f"{name}.norm.weight", num_values, cut=by_head)
        sections = values, *channels, Section(heads.num_value_heads)
        return Mamba2(
            norm=norm,
            inputs=tensors.linear(width, {f"{name}.in_proj": sections}, axis="outputs"),
            output=tensors.linear(num_values, {f"{name}.out_proj": width}, axis="inputs"),
            weights=StateWeights(
                convolution[:, 0].t().contiguous().t(),
                by_value_head("A_log"),
                by_value_head("dt_bias"),
                bias=bias,
                skip=by_value_head("D"),
            ),
            gated_norm=Norm(gated_by.view(heads.num_key_heads, -1), norm.eps),
            state=HeadStates(heads, num_taps),
            factor=factor,
        )

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        state, norm = self.state, self.gated_norm
        heads = state.heads
        sizes = norm.weight.numel(), heads.num_channels, heads.all_scalars
        z, vkq, dt = self.inputs.pieces_of_normed(x, normed, self.norm, sizes)
        y = mamba2(vkq, dt, heads, self.weights, state.bound, batch.rows, batch.num_tokens)
        gated = gated_norm(y.view(len(y), *norm.weight.shape), norm, z, gates_first=True)
        return self.add(x, self.output, gated, next_norm)

"""A gated delta net: it looks at other tokens through a state of one size, not through their KV."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.model.delta_net import delta_net
from outrider.kernels.model.gated_norm import gated_norm
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.row_codes import Rows
from outrider.kernels.model.state_layer import StateHeads, StateWeights

from ..attention import ForwardBatch
from ..checkpoint import AnyCheckpoint
from ..shares import Cut, Outputs, Section
from .head_states import HeadStates, StatePart


@dataclass(slots=True)
class DeltaNet(StatePart):
    """output(norm(delta_net(q, k, v, b, a)) silu(z)),  q, k, v, z, b, a = inputs(norm(x))."""

    @staticmethod
    def read(
        tensors: AnyCheckpoint,
        name: str,
        *,
        norm: Norm,
        width: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        num_taps: int,
        by_key_head: bool,
    ) -> "DeltaNet":
        """`by_key_head`: the inputs of a key head and its value heads lie together.

        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape.
        """
        heads = StateHeads(num_key_heads, num_value_heads, key_dim, value_dim, num_scalars=2)
        num_values, order = num_value_heads * value_dim, None
        num_keys = heads.num_key_heads * heads.key_dim
        keys, by_head = Section(num_keys), Cut("outputs")
        channels = keys, keys, Section(num_values)
        num_channels = 2 * num_keys + num_values
        sizes: dict[str, Outputs] = {
            "in_proj_qkv": channels,
            "in_proj_z": num_values,
            "in_proj_b": heads.num_value_heads,
            "in_proj_a": heads.num_value_heads,
        }
        if by_key_head:
            sizes = {
                "in_proj_qkvz": num_channels + num_values,
                "in_proj_ba": 2 * heads.num_value_heads,
            }
            order = rows_by_kind(heads).to(tensors.device)
        convolution = tensors.tensor(
            f"{name}.conv1d.weight", num_channels, 1, num_taps, cut=Cut("outputs", channels)
        )
        return DeltaNet(
            norm=norm,
            inputs=tensors.linear(
                width,
                {f"{name}.{part}": size for part, size in sizes.items()},
                axis="outputs",
                order=order,
            ),
            output=tensors.linear(num_values, {f"{name}.out_proj": width}, axis="inputs"),
            weights=StateWeights(
                convolution[:, 0].t().contiguous().t(),
                tensors.float32(f"{name}.A_log", heads.num_value_heads, cut=by_head),
                tensors.float32(f"{name}.dt_bias", heads.num_value_heads, cut=by_head),
            ),
            gated_norm=Norm(tensors.float32(f"{name}.norm.weight", heads.value_dim), norm.eps),
            state=HeadStates(heads, num_taps),
        )

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        state, heads = self.state, self.state.heads
        sizes = heads.num_channels, heads.num_value_heads * heads.value_dim, heads.all_scalars
        qkv, z, ba = self.inputs.pieces_of_normed(x, normed, self.norm, sizes)
        y = delta_net(qkv, ba, heads, self.weights, state.bound, batch.rows, batch.num_tokens)
        return self.output.add_to(x, gated_norm(y, self.gated_norm, z), norm=next_norm)


def rows_by_kind(heads: StateHeads) -> Tensor:
    """Of rows that lie by key head (q, k, v, z of each, then b, a of each), the order in which
    they are q, k, v, z, b, a of all heads. Shape: -> [rows]
    """
    num_key_heads = heads.num_key_heads
    repeats = heads.num_value_heads // num_key_heads
    num_values = repeats * heads.value_dim
    num_first = num_key_heads * 2 * (heads.key_dim + num_values)
    of_key_heads = torch.arange(num_first).view(num_key_heads, -1)
    q, k, v, z = of_key_heads.split([heads.key_dim, heads.key_dim, num_values, num_values], 1)
    b, a = (
        (num_first + torch.arange(2 * heads.num_value_heads)).view(num_key_heads, 2, -1).unbind(1)
    )
    return torch.cat([part.flatten() for part in (q, k, v, z, b, a)])

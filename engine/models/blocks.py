"""The two parts of a decoder block: a mixer, which looks at other tokens, and an MLP.

A part gets the residual stream x and adds its output to it, in place:

    x += part(norm(x))

If the part before has already applied this norm, the result is passed as `normed`. In the same way
a part applies the norm of the next part if that is cheap, and returns the result, or else None. A
new kind of layer is a class of this form, which a subclass of `LlamaReader` builds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.rope import rope_and_store
from outrider.kernels.model.row_codes import Normed

from .attention import PagedAttention, PassContext, Rope
from .experts import ExpertMLP
from .weights import Kept, Linear


@dataclass(slots=True)
class AttentionMixer:
    """Attention with RoPE and, in some families, a norm for each head."""

    norm: Norm
    qkv: Linear  # query heads, then key heads, then value heads
    output: Linear
    attention: PagedAttention
    rope: Rope
    head_norms: tuple[Norm, Norm] | None = None  # of query and key heads

    def __post_init__(self) -> None:
        self.norm = self.qkv.weight.before(self.norm)

    def __call__(
        self, x: Tensor, normed: Normed | None, next_norm: Norm | None, context: PassContext
    ) -> Normed | None:
        qkv = self.qkv.of_normed(x, normed, self.norm)
        query = self.store(qkv, self.attention.num_heads, context)
        out = self.attention(query, context)
        return self.output.add_to(x, out.flatten(1), norm=next_norm)

    def store(self, qkv: Tensor, num_heads: int, context: PassContext) -> Tensor:
        """Leave keys and values in the pages; returns the rotated queries, if the rows have any.

        Shape: qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> [T, num_heads, head_dim]
        """
        q_norm, k_norm = self.head_norms or (None, None)
        return rope_and_store(
            qkv,
            *context.rotary(self.rope, qkv.dtype),
            *self.attention.bound_pages,
            context.batch.rows.slot_mapping,
            num_heads,
            q_norm,
            k_norm,
            self.attention.k_scale,
            self.attention.v_scale,
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output

    def changed(self, change: Callable[[Linear], Linear]) -> "AttentionMixer":
        return replace(self, qkv=change(self.qkv), output=change(self.output))


@dataclass(slots=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    norm: Norm
    gate_up: Linear  # the gate's outputs, then those of `up`
    down: Linear

    def __post_init__(self) -> None:
        self.norm = self.gate_up.weight.before(self.norm)

    def __call__(
        self, x: Tensor, normed: Normed | None, next_norm: Norm | None, context: PassContext
    ) -> Normed | None:
        gated = self.gate_up.of_normed(x, normed, self.norm, gated=True)
        return self.down.add_to(x, gated, norm=next_norm)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def changed(self, change: Callable[[Linear], Linear]) -> "GatedMLP":
        return replace(self, gate_up=change(self.gate_up), down=change(self.down))


@dataclass(slots=True)
class Block:
    """A mixer, then an MLP."""

    mixer: AttentionMixer
    mlp: GatedMLP | ExpertMLP

    def __call__(
        self, x: Tensor, normed: Normed | None, next_norm: Norm | None, context: PassContext
    ) -> Normed | None:
        """Shape: x, normed [T, hidden]; returns next_norm(x) or None."""
        normed = self.mixer(x, normed, self.mlp.norm, context)
        return self.mlp(x, normed, next_norm, context)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.mixer.linears, *self.mlp.linears

    @property
    def weights(self) -> tuple[Kept, ...]:
        experts = (self.mlp.experts,) if isinstance(self.mlp, ExpertMLP) else ()
        return *(linear.weight for linear in self.linears), *experts

    @property
    def num_weights(self) -> int:
        return sum(weight.num_weights for weight in self.weights)

    def changed(self, change: Callable[[Linear], Linear]) -> "Block":
        """The same block with its linear layers replaced."""
        return Block(self.mixer.changed(change), self.mlp.changed(change))

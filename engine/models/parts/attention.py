"""Attention with RoPE: to all tokens or a window, with sinks, head norms and gates if any."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.row_codes import Rows
from outrider.kernels.model.sigmoid_gate import gate_heads

from ..attention import ForwardBatch, KeptRows, PagedAttention, Rope
from ..checkpoint import AnyCheckpoint
from ..shares import Cut, Outputs, Ranks, Section
from ..weights import Linear
from .base import Compiled, Part

# What checkpoints call what keys and values in FP8 are multiplied by; the last is of both.
_KV_SCALES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")
_COMPILED_DIM = 16  # of which a head's width must be a multiple


@dataclass(slots=True)
class Attention(Part):
    """o_proj(attention(rope(q), rope(k), v)), q, k, v = qkv(norm(x)).

    If it is gated, each query head is followed by its gate, and attention is multiplied by
    sigmoid(gate). Then it has no wide norms.
    """

    qkv: Linear  # query heads, then key heads, then value heads
    output: Linear
    attention: PagedAttention
    rope: Rope
    head_norms: tuple[Norm, Norm] | None = None  # of each query and key head
    wide_norms: tuple[Norm, Norm] | None = None  # of all query and all key heads together
    ranks: Ranks | None = None  # that have the other heads
    kv_copies: int = 1  # how many of them, one after the other, have the same KV heads
    gated: bool = False

    def __post_init__(self) -> None:
        self.norm = self.norm and self.qkv.weight.before(self.norm)

    @staticmethod
    def read(
        tensors: AnyCheckpoint,
        name: str,
        *,
        norm: Norm | None,
        eps: float,
        rope: Rope,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_copies: int = 1,
        window: int | None = None,
        causal: bool = True,
        input_width: int | None = None,
        gated: bool = False,
        norms_add_one: bool = False,
        fused: bool = False,
        wide: bool = False,
        post_norm: Norm | None = None,
        scale: float | None = None,
    ) -> "Attention":
        """With those norms of heads, biases, sinks and scales of KV that the checkpoint has.

        `kv_copies`: how many ranks, one after the other, have the same KV heads. `input_width`: of
        the rows that it reads, if not the residual stream's `width`. `fused`: the checkpoint has
        q, k and v as one layer. `wide`: a norm spans all heads. `scale`: of scores.
        `eps` is that of norms of heads, which add one as in `AnyCheckpoint.norm`. Raises KeyError
        naming a tensor that is missing, ValueError naming a wrong shape.
        """
        has_norms, has_sinks = f"{name}.q_norm.weight" in tensors, f"{name}.sinks" in tensors
        num_q, num_kv = num_heads * head_dim, num_kv_heads * head_dim
        q, kv = Section(2 * num_q if gated else num_q), Section(num_kv, kv_copies)
        sizes: dict[str, Outputs] = {"q_proj": (q,), "k_proj": (kv,), "v_proj": (kv,)}
        if fused:
            sizes = {"qkv_proj": (q, kv, kv)}
        norms = None
        if has_norms:
            q_size, k_size = (num_q, num_kv) if wide else (head_dim, head_dim)
            q_cut, k_cut = (Cut("outputs", (each,)) if wide else None for each in (q, kv))
            norms = (
                tensors.norm(f"{name}.q_norm", q_size, eps, adds_one=norms_add_one, cut=q_cut),
                tensors.norm(f"{name}.k_norm", k_size, eps, adds_one=norms_add_one, cut=k_cut),
            )
        return Attention(
            norm=norm,
            qkv=tensors.linear(
                input_width or width,
                {f"{name}.{part}": size for part, size in sizes.items()},
                axis="outputs",
            ),
            output=tensors.linear(num_q, {f"{name}.o_proj": width}, axis="inputs"),
            attention=PagedAttention(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=head_dim,
                scale=head_dim**-0.5 if scale is None else scale,
                window=window,
                sinks=tensors.tensor(f"{name}.sinks", num_heads, cut=Cut("outputs"))
                if has_sinks
                else None,
                k_scale=_kv_scale(tensors, name, "k"),
                v_scale=_kv_scale(tensors, name, "v"),
                causal=causal,
            ),
            rope=rope,
            head_norms=None if wide else norms,
            wide_norms=norms if wide else None,
            kv_copies=kv_copies,
            post_norm=post_norm,
            gated=gated,
        )

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        if uses_triton(x):
            batch.items(self.attention)  # before the product, as in `_stored`
        query, qkv = self._stored(x, normed, batch)
        return self._add_attended(x, query, qkv, next_norm, batch)

    def of_rows(
        self, kept: KeptRows, x: Tensor, normed: Rows | None, batch: ForwardBatch
    ) -> Tensor:
        rows, its = kept
        if uses_triton(x):
            its.items(self.attention)
        query, qkv = self._stored(x, normed, batch)
        x = x[rows]
        if len(rows):
            # Gates lie as those of all rows do: a CPU's sigmoid has other bits where they do not.
            self._add_attended(x, query[rows], qkv[rows] if self.gated else qkv, None, its)
        return x

    def _stored(self, x: Tensor, normed: Rows | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Queries of rows whose KV is stored then, and the product that they are of.

        Shape: x, normed [T, hidden] -> [T, num_heads, head_dim], [T, outputs of qkv]
        """
        # Launched before the product: what reads them does so before it waits for its inputs.
        batch.rotary(self.rope, x.dtype)
        if uses_triton(x):
            batch.places(self.attention)
        qkv = self.qkv.of_normed(x, normed, self.norm)
        attend = self.attention
        if self.wide_norms is not None:
            assert not self.gated
            num_q, num_kv = (n * attend.head_dim for n in (attend.num_heads, attend.num_kv_heads))
            query, key, _ = qkv.split([num_q, num_kv, num_kv], 1)
            q_norm, k_norm = self.wide_norms
            self._norm_wide(query, q_norm, 1)
            self._norm_wide(key, k_norm, self.kv_copies)
        query = attend.store(
            qkv, attend.num_heads, self.rope, self.head_norms, batch, gated=self.gated
        )
        return query, qkv

    def _add_attended(
        self, x: Tensor, query: Tensor, qkv: Tensor, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        """Let rows attend, and add the outputs to x; returns next_norm(x) or None."""
        attended = self.attention(query, batch)
        if not self.gated:
            return self.add(x, self.output, attended.flatten(1), next_norm)
        rows = gate_heads(attended, self._gates(qkv), self.output.weight.row_format)
        return self.add(x, self.output, rows, next_norm)

    def _norm_wide(self, part: Tensor, norm: Norm, copies: int) -> None:
        """Normalise a row's heads together, with those of other ranks. Shape: [T, own heads]"""
        if self.ranks is None:
            rms_norm(part, norm, out=part)
            return
        of_all = self.ranks.gather(part.contiguous())[::copies]
        normed = rms_norm(of_all.transpose(0, 1).flatten(1), norm)
        part.copy_(normed.view(len(part), -1, part.shape[1])[:, self.ranks.rank // copies])

    def over_ranks(self, ranks: Ranks) -> "Attention":
        if self.wide_norms is None:
            return self
        query, key = (
            norm._replace(weight=ranks.gather(norm.weight[None])[::copies].flatten())
            for norm, copies in zip(self.wide_norms, (1, self.kv_copies), strict=True)
        )
        return replace(self, wide_norms=(query, key), ranks=ranks)

    def _gates(self, qkv: Tensor) -> Tensor:
        """Shape: -> [T, num_heads, head_dim]"""
        num_heads, head_dim = self.attention.num_heads, self.attention.head_dim
        queries, _ = qkv.tensor_split([2 * num_heads * head_dim], 1)
        return queries.view(len(qkv), num_heads, 2, head_dim).unbind(2)[1]

    def compiled(self) -> Compiled | None:
        layer, norm = self.attention, self.norm
        if norm is None or self.post_norm or self.wide_norms:
            return None
        if layer.softcap is not None or layer.sinks is not None or self.gated:
            return None
        if 2 * len(self.rope.inv_freq) != layer.head_dim:
            return None
        if layer.head_dim != layer.value_dim or layer.head_dim % _COMPILED_DIM:
            return None
        q_norm, k_norm = self.head_norms or (None, None)
        return Compiled(
            shape={
                "hidden": self.output.weight.shape[0],
                "heads": layer.num_heads,
                "kv_heads": layer.num_kv_heads,
                "head_dim": layer.head_dim,
                "eps": norm.eps,
                "head_eps": q_norm.eps if q_norm else 0.0,
                "scale": layer.scale,
            },
            layer={
                "norm": norm.weight,
                "q_norm": q_norm and q_norm.weight,
                "k_norm": k_norm and k_norm.weight,
                "qkv": self.qkv,
                "output": self.output,
                "window": layer.window or 0,
            },
            rope=self.rope,
        )


def _kv_scale(tensors: AnyCheckpoint, name: str, which: str) -> float:
    """The scale of keys ("k") or values ("v") in pages of FP8; 1 if the checkpoint has none.

    Raises ValueError if heads have scales of their own, or the scale is no positive number.
    """
    names = [f"{name}.{scale.format(which)}" for scale in _KV_SCALES]
    found = next((scale for scale in names if scale in tensors), None)
    if found is None:
        return 1.0
    scale = tensors.stored(found)
    if scale.numel() != 1:
        raise ValueError(f"{found} has {scale.numel()} scales; one for all heads is read")
    if not 0 < float(scale) < math.inf:
        raise ValueError(f"{found} is {float(scale)}; it must be a positive number")
    return float(scale)

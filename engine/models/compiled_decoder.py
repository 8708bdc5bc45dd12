"""A decoder whose layers run on a CPU in one compiled call."""

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import is_

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu import layers as cpu
from outrider.kernels.cpu.layers import pointer
from outrider.kernels.cpu.packing import TILE
from outrider.kernels.model.rms_norm import rms_norm_reference
from outrider.kernels.model.rope import rotary_table

from .attention import PagedAttention, PassContext, Rope
from .blocks import AttentionMixer, Block, GatedMLP
from .decoder import Decoder
from .network import Pass
from .weights import Linear, Tiles

_DIM_MULTIPLE = 16  # of a head
_FEWEST_POSITIONS = 1024


def can_compile(decoder: Decoder) -> bool:
    """Whether the compiled layers can do everything that this decoder does."""
    if cpu.compiled() is None or decoder.dtype not in (torch.float32, torch.bfloat16):
        return False
    return all(map(_is_known, decoder.blocks)) and len(set(map(_shape_of, decoder.blocks))) == 1


def _is_known(block: Block) -> bool:
    mixer, mlp = block.mixer, block.mlp
    if not isinstance(mixer, AttentionMixer) or not isinstance(mlp, GatedMLP):
        return False
    attention = mixer.attention
    return (
        all(isinstance(linear.weight, Tiles) for linear in block.linears)
        and attention.softcap is None
        and attention.sinks is None
        and attention.head_dim == attention.value_dim
        and attention.head_dim % _DIM_MULTIPLE == 0
        and mlp.gate_up.weight.shape[0] % (2 * TILE) == 0
    )


def _shape_of(block: Block) -> tuple[float, ...]:
    """What all layers must have in common: heads, head width, MLP width, eps, scale."""
    mixer, attention, mlp = block.mixer, block.mixer.attention, block.mlp
    assert isinstance(mlp, GatedMLP)
    head_eps = mixer.head_norms[0].eps if mixer.head_norms else 0.0
    return (
        mlp.down.weight.shape[0],
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        mlp.down.weight.shape[1],
        mixer.norm.eps,
        head_eps,
        attention.scale,
    )


class CompiledDecoder(Decoder):
    """Computes in float32 between its layers; the bits of a row do not depend on the batch."""

    def __init__(self, decoder: Decoder, *, is_tied: bool = False) -> None:
        """Take over a decoder for which `can_compile` is true.

        `is_tied`: its head is the embedding, in the file's own codes, and serves as both.
        """
        super().__init__(decoder.embedding, decoder.blocks, decoder.norm, decoder.head)
        self._is_tied = is_tied
        if is_tied:
            del self.embedding
        self._drafted, self.vocab_size = decoder._drafted, decoder.vocab_size
        self._last_norm = decoder.norm._replace(weight=decoder.norm.weight.float())
        self._held: list[Tensor] = []  # keeps alive what the layers point to
        self._layers = [self._described(block) for block in self.blocks]
        self._bound: list[object] = []
        self._num_positions = 0  # positions in the layers' tables of cos and sin
        *sizes, eps, head_eps, scale = _shape_of(self.blocks[0])
        hidden, heads, kv_heads, head_dim, intermediate = map(int, sizes)
        self._shape = cpu.Shape(hidden, heads, kv_heads, head_dim, intermediate)
        self._shape.eps, self._shape.head_eps, self._shape.scale = eps, head_eps, scale

    @property
    def input_embedding(self) -> Tensor:
        return self.head.weight.dequantised() if self._is_tied else self.embedding

    @property
    def weight_formats(self) -> str:
        num_weights = sum(math.prod(linear.weight.shape) for linear in self.linears)
        return f"{8 * self.weight_bytes / num_weights:.1f} bits, compiled layers"

    def __call__(self, context: PassContext) -> Pass:
        batch, rows_of = context.batch, context.batch.rows
        self._bind(self.attentions)
        x = self._embedded(batch.input_ids)
        kept = [
            tensor.to(torch.int64).contiguous()
            for tensor in (
                rows_of.slot_mapping,
                rows_of.positions,
                rows_of.cu_seqlens_q,
                rows_of.seq_lens,
                rows_of.slots,
            )
        ]
        places, positions, first_rows, lengths, slots = (pointer(t, torch.int64) for t in kept)
        assert batch.block_table.dtype == torch.int32
        assert batch.block_table.stride(1) == 1
        rows = cpu.Batch(
            len(x),
            len(rows_of.seq_lens),
            first_rows,
            lengths,
            slots,
            places,
            positions,
            batch.block_table.data_ptr(),
            batch.block_table.stride(0),
        )
        if len(x):
            self._reach(int(rows_of.positions.max()))
        taps = []
        for first, last in pairwise([0, *(i + 1 for i in sorted(self.tapped_layers)), None]):
            layers = self._layers[first:last]
            if layers:
                cpu.run_layers(cpu.array(layers), self._shape, rows, x)
            if last is not None:
                is_normed = last > len(self._layers)
                tapped = rms_norm_reference(x, self._last_norm) if is_normed else x
                # The next layers change x in place, and float32 to float32 would be no copy.
                taps.append(tapped.to(self.dtype, copy=True))
        del kept  # kept alive until here: the layers point to them
        logits = self._head(x[batch.logits_rows])
        return Pass(self._widened(logits), torch.stack(taps, 1) if taps else None)

    def _embedded(self, input_ids: Tensor) -> Tensor:
        if self._is_tied:
            assert isinstance(self.head.weight, Tiles)
            return self.head.weight.rows(input_ids)
        return F.embedding(input_ids, self.embedding).float()

    def _head(self, rows: Tensor) -> Tensor:
        out = self.place_of_logits(len(rows))
        if isinstance(self.head.weight, Tiles):
            return self.head(rows, norm=self._last_norm, out=out)
        return self.head(rows.to(self.dtype), norm=self.norm, out=out)

    def _described(self, block: Block) -> cpu.Layer:
        mixer, mlp = block.mixer, block.mlp
        assert isinstance(mlp, GatedMLP)
        q_norm, k_norm = mixer.head_norms or (None, None)
        window = mixer.attention.window or 0
        return cpu.Layer(
            norm=self._kept(mixer.norm.weight),
            mlp_norm=self._kept(mlp.norm.weight),
            q_norm=self._kept(q_norm.weight) if q_norm else 0,
            k_norm=self._kept(k_norm.weight) if k_norm else 0,
            qkv=self._matrix(mixer.qkv),
            output=self._matrix(mixer.output),
            gate_up=self._matrix(mlp.gate_up),
            down=self._matrix(mlp.down),
            window=window,
        )

    def _matrix(self, linear: Linear) -> cpu.Matrix:
        assert isinstance(linear.weight, Tiles)
        bias = None if linear.bias is None else linear.bias.float().contiguous()
        if bias is not None:
            self._held.append(bias)
        return cpu.matrix(linear.weight.matrix, bias)

    def _kept(self, weight: Tensor) -> int:
        self._held.append(weight.float().contiguous())
        return self._held[-1].data_ptr()

    def _bind(self, attentions: Sequence[PagedAttention]) -> None:
        """Point the layers to their pages, if these have changed."""
        bound: list[object] = [attention.bound_pages for attention in attentions]
        if len(bound) == len(self._bound) and all(map(is_, bound, self._bound)):
            return
        self._bound = bound
        for layer, attention in zip(self._layers, attentions, strict=True):
            keys, values = attention.bound_pages
            layer.keys, layer.values = pointer(keys, keys.dtype), pointer(values, keys.dtype)
        assert keys.dtype in (torch.float32, torch.bfloat16)
        self._shape.cache_is_bf16 = keys.dtype == torch.bfloat16
        self._shape.page_size = keys.shape[1]

    def _reach(self, position: int) -> None:
        """Extend the layers' tables of cos and sin to positions up to this one."""
        if position < self._num_positions:
            return
        self._num_positions = max(_FEWEST_POSITIONS, 1 << position.bit_length())
        positions = torch.arange(self._num_positions)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # by the rope's frequencies
        for layer, block in zip(self._layers, self.blocks, strict=True):
            rope: Rope = block.mixer.rope
            key = id(rope.inv_freq)
            if key not in self._tables:
                self._tables[key] = rotary_table(positions, *rope, torch.float32)
            layer.cos, layer.sin = (pointer(t, torch.float32) for t in self._tables[key])

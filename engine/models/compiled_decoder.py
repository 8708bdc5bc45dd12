"""A decoder whose passes run on a CPU in one compiled call each."""

import math
from collections import Counter
from ctypes import addressof, c_int32

import torch
from torch import Tensor

from outrider.kernels.cpu import layers as cpu
from outrider.kernels.cpu.layers import pointer
from outrider.kernels.model.rope import rotary_table
from outrider.kernels.model.rows import BatchRows
from outrider.kernels.verify.cpu import LinesOfDrafts

from ..state.batch import HostBatch
from ..state.slots import Slots
from .attention import ForwardBatch, PagedAttention
from .blocks import Block
from .decoder import Decoder
from .network import Pass
from .parts.base import Compiled
from .weights import Linear, Tiles

# What the parts of a block must say of it; the rest comes with pages and positions.
_FIELDS = {field[0] for field in cpu.LayerStruct._fields_} - {"keys", "values", "cos", "sin"}
_FEWEST_POSITIONS = 1024
_MOST_KEPT_ROWS = 64  # of logits, which the next pass writes over


def can_compile(decoder: Decoder) -> bool:
    """Whether the compiled layers can do everything that this decoder does."""
    if cpu.compiled() is None or decoder.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not all(isinstance(linear.weight, Tiles) for linear in decoder.linears):
        return False
    factors = [part.factor for block in decoder.blocks for part in block.parts]
    if {decoder.embedding_factor, decoder.logits_divisor, *factors} != {1}:
        return False
    layers = [layer for block in decoder.blocks if (layer := _layer_of(block))]
    is_alike = all(layer.shape == layers[0].shape for layer in layers)
    return is_alike and len(layers) == len(decoder.blocks)


def _layer_of(block: Block) -> Compiled | None:
    """All that its parts say of it; None if they do not say enough, or contradict each other."""
    layer = Compiled({}, {})
    for part in block.parts:
        said = part.compiled()
        if said is None or layer.shape | said.shape != said.shape | layer.shape:
            return None
        rope = layer.rope or said.rope
        layer = Compiled(layer.shape | said.shape, layer.layer | said.layer, rope)
    return layer if layer.rope and layer.layer.keys() == _FIELDS else None


class CompiledDecoder(Decoder):
    """Computes in float32 between its layers; the bits of a row do not depend on the batch.

    `forward` looks rows up in the slots within the call: a step of a small draft would take longer
    to do that in torch. A call with a ForwardBatch takes rows without slots: the proof's, at load.
    """

    reads_one_table = True
    attention_is_batch_invariant = True  # compiled code attends to each row by itself

    def __init__(self, decoder: Decoder, *, is_tied: bool = False) -> None:
        """Take over a decoder for which `can_compile` is true.

        `is_tied`: its output layer is the embedding, in the file's own codes, and serves as both.
        """
        super().__init__(decoder.embedding, decoder.blocks, decoder.norm, decoder.output_layer)
        self._is_tied = is_tied
        if is_tied:
            del self.embedding
        self.token_map = tokens = decoder.token_map
        self.vocab_size = decoder.vocab_size
        self._held: list[Tensor] = []  # keeps alive what the layers point to
        layers = [layer for block in self.blocks if (layer := _layer_of(block))]
        self._ropes = [layer.rope for layer in layers if layer.rope]
        self._layers = (cpu.LayerStruct * len(layers))()
        for described, layer in zip(self._layers, layers, strict=True):
            for name, value in layer.layer.items():
                setattr(described, name, self._field(value))
        self._layer_of = {id(a): i for i, a in enumerate(self.attentions)}
        self._num_positions = 0  # positions in the layers' tables of cos and sin
        self._decoder = cpu.DecoderStruct(
            addressof(self._layers),
            len(self._layers),
            cpu.ShapeStruct(**layers[0].shape),
            0 if is_tied else pointer(self.embedding, self.dtype),
            self.dtype == torch.bfloat16,
            self._field(self.norm.weight),
            self._field(self.output_layer),
            pointer(None if tokens is None else tokens.target_ids, torch.int64),
            pointer(None if tokens is None else tokens.read_as, torch.int64),
        )

    def bind_layer(self, layer: PagedAttention, num_pages: int, page_size: int) -> None:
        super().bind_layer(layer, num_pages, page_size)
        keys, values = layer.bound_pages
        assert keys.dtype in (torch.float32, torch.bfloat16)
        described = self._layers[self._layer_of[id(layer)]]
        described.keys, described.values = pointer(keys, keys.dtype), pointer(values, keys.dtype)
        self._decoder.shape.cache_is_bf16 = keys.dtype == torch.bfloat16
        self._decoder.shape.page_size = page_size

    def bind_slots(self, slots: Slots) -> None:
        super().bind_slots(slots)
        num_tokens = pointer(slots.num_tokens, torch.int64)
        token_ids, width = pointer(slots.token_ids, torch.int32), slots.token_ids.shape[1]
        # What calls are given whose rows are looked up here; each fills in the rest.
        self._given = (
            self._batch(slots.block_tables[0]),
            cpu.SlotsStruct(num_tokens=num_tokens, token_ids=token_ids, token_stride=width),
        )

    @property
    def input_embedding(self) -> Tensor:
        return self.output_layer.weight.dequantised() if self._is_tied else self.embedding

    @property
    def weight_formats(self) -> str:
        numbers = Counter[str]()
        for weight in self.weights:
            numbers[weight.format] += math.prod(weight.shape)
        ((most_common, _),) = numbers.most_common(1)
        return f"{most_common}, CPU kernels"

    def dtype_of_pages(self, layer: PagedAttention) -> torch.dtype:
        return self.cache_dtype or self.dtype  # it reads bfloat16 as fast, unlike torch's attention

    def __call__(self, batch: ForwardBatch) -> Pass:
        rows = batch.rows
        num_rows, num_logits = len(batch.input_ids), len(batch.logits_rows)
        if num_rows:
            self._reach(int(rows.positions.max()) + 1)
        given = self._batch(batch.block_tables[0])
        computed = self._writes(given, len(rows.seq_lens), num_rows, num_logits)
        given.first_rows = pointer(rows.cu_seqlens_q, torch.int64)
        given.lengths = pointer(rows.seq_lens, torch.int64)
        given.slots = pointer(rows.slots, torch.int64)
        given.token_ids = pointer(batch.input_ids, torch.int64)
        given.positions = pointer(rows.positions, torch.int64)
        given.places = pointer(rows.places, torch.int64)
        given.logits_rows = pointer(batch.logits_rows, torch.int64)
        cpu.run_pass(self._decoder, given)
        return self._rounded(computed)

    def forward(self, batch: HostBatch) -> Pass:
        """As any network does; one call looks the rows up and computes them."""
        assert batch.more is None, "on a CPU the host knows all rows"
        given, rows, computed = self._in_slots(batch)
        rows.rows = 0
        if computed.taps is not None:
            num_seqs, num_rows, _ = batch.shape
            found = torch.empty(3 * num_rows + 2 * num_seqs + 1, dtype=torch.int64)
            rows.rows = found.data_ptr()
            slot_of_row, positions, places, lengths, first_rows = found.split(
                [*[num_rows] * 3, num_seqs, num_seqs + 1]
            )
            seqs = torch.from_numpy(batch.sequences_np[0])
            of_taps = BatchRows(slot_of_row, positions, places, seqs, lengths, first_rows)
            computed = computed._replace(rows=of_taps)
        cpu.run_pass_in_slots(self._decoder, given, rows)
        return self._rounded(computed)._replace(shape=batch.shape)

    def draft_in_slots(self, batch: HostBatch, drafts: LinesOfDrafts) -> None:
        """Compute rows as `forward` does, then draw drafts and compute theirs, all in one call.

        The batch has a row of logits for each sequence to draft for.
        """
        num_later = int(drafts.counts_np.max()) - 1  # positions: the last draft is not computed
        given, rows, computed = self._in_slots(batch, num_later=num_later)
        drafts.draw(self._decoder, given, rows, computed.logits)

    def _in_slots(
        self, batch: HostBatch, *, num_later: int = 0
    ) -> tuple[cpu.BatchStruct, cpu.SlotsStruct, Pass]:
        """A call's batch, where its rows are looked up, and the tensors that it writes to.

        The call goes on for up to `num_later` positions after each sequence's rows.
        """
        known = self._slots.num_tokens.tolist()
        ends = [known[slot] + first + num for slot, first, num, _ in batch.sequences_np.T.tolist()]
        self._reach(max(ends, default=0) + num_later)
        given, rows = self._given
        computed = self._writes(given, *batch.shape)
        first, row_len = batch.sequences_np.ctypes.data, batch.sequences_np.strides[0]
        rows.slots, rows.starts = first, first + row_len
        rows.row_counts, rows.logits_counts = first + 2 * row_len, first + 3 * row_len
        return given, rows, computed

    def _batch(self, block_table: Tensor) -> cpu.BatchStruct:
        """A call's batch, without its rows and the tensors that it writes to."""
        return cpu.BatchStruct(
            block_table=pointer(block_table, torch.int32),
            block_table_stride=block_table.shape[1],
            is_bf16=self.dtype == torch.bfloat16,
        )

    def _writes(
        self, given: cpu.BatchStruct, num_seqs: int, num_rows: int, num_logits: int
    ) -> Pass:
        """Have a call of this shape write to these tensors."""
        logits, taps = self.place_of_logits(num_logits), None
        given.sequences, given.num_logits = num_seqs, num_logits
        given.logits, given.vocab_size = logits.data_ptr(), self.vocab_size
        if self.tapped_layers:
            self._tapped = tapped = (c_int32 * len(self.tapped_layers))(*self.tapped_layers)
            taps = torch.empty(num_rows, len(tapped), self._decoder.shape.hidden)
            given.num_taps, given.tapped = len(tapped), addressof(tapped)
            given.taps = pointer(taps, torch.float32)
        return Pass(logits, taps)

    def _rounded(self, computed: Pass) -> Pass:
        taps = computed.taps
        return computed if taps is None else computed._replace(taps=taps.to(self.dtype))

    def place_of_logits(self, num_rows: int) -> Tensor:
        """The tensor to write this many rows of logits to; tokens that are not drafted get -inf.

        Shape: -> [num_rows, V].
        """
        if self._logits is not None and num_rows <= len(self._logits):
            return self._logits[:num_rows]
        logits = torch.full((num_rows, self.vocab_size), -torch.inf, dtype=self.dtype)
        if num_rows <= _MOST_KEPT_ROWS:
            self._logits = logits
        return logits

    def _field(self, value: Linear | Tensor | int | None) -> cpu.MatrixStruct | int:
        if isinstance(value, Linear):
            assert isinstance(value.weight, Tiles)
            bias = None if value.bias is None else self._kept(value.bias)
            return cpu.matrix(value.weight.matrix, bias)
        return self._kept(value).data_ptr() if isinstance(value, Tensor) else value or 0

    def _kept(self, tensor: Tensor) -> Tensor:
        self._held.append(tensor.float().contiguous())
        return self._held[-1]

    def _reach(self, num_positions: int) -> None:
        """Extend the layers' tables of cos and sin to at least this many positions."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = max(_FEWEST_POSITIONS, 1 << (num_positions - 1).bit_length())
        positions = torch.arange(self._num_positions)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # by the rope's frequencies
        for layer, rope in zip(self._layers, self._ropes, strict=True):
            key = id(rope.inv_freq)
            if key not in self._tables:
                self._tables[key] = rotary_table(positions, *rope, torch.float32)
            layer.cos, layer.sin = (pointer(t, torch.float32) for t in self._tables[key])

"""The interface of a model: rows of a batch in, logits and taps out, keys and values in pages.

A network computes a batch on the device when it is called. `forward` brings one of the host there,
whose rows it looks up in the slots, and replays a captured pass if there is one.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.model.row_scaled_few_rows import ROWS as TILE_ROWS
from outrider.kernels.model.rows import BatchRows

from ..config import DraftVocabulary
from ..progress import ReportCounts
from ..state.batch import HostBatch
from ..state.phase import Captured, Phase, Shape, padded_sizes
from ..state.ragged import NONE_NP
from ..state.slots import Slots
from .admission import UnsupportedModelError
from .attention import MOST_LOOKED_UP_ROWS, ForwardBatch, PagedAttention
from .slot_state import SlotState
from .token_map import TokenMap
from .weights import Linear

# Passes with prompts are captured in steps of an eighth of a power of two, of _ROWS_STEP at least,
# up to `Network.host_bound_rows`.
_ROWS_STEP = 128
_LEAST_HOST_BOUND = 1024
# Launching a layer takes the host some 0.7 ms. In that time an H200 multiplies so many rows by a
# byte of weights, in 16 or in 8 bits: its rate is twice as high for the latter.
_ROW_BYTES_A_LAYER = 450_000_000_000
# Rows of a sequence, beyond the usual ones, for which passes are captured: up to 8 each number,
# then few. With more than MOST_LOOKED_UP_ROWS in all a pass is padded to a step of _ROWS_STEP.
_LONG_ROWS = (33, 24, 16, 12, 8)
_SHORT_ROWS = (16, 8, 4, 2, 1)  # rows a sequence; attention has a block size for each


class PagedLayers(ABC):
    """The attention layers of one model, each with its part of every page."""

    dtype: torch.dtype
    device: torch.device
    vocab_size: int  # width of the logits
    cache_dtype: torch.dtype | None = None  # of keys and values; None: the model's
    lookahead: int = 0  # how many tokens after its own the KV of a row depends on
    token_map: TokenMap | None = None  # of a draft; None: its tokens are the target's
    reads_one_table: bool = False  # whether all its layers must share a block table
    may_fall_behind: bool = False  # of a draft model: it then reads what others have long passed
    # [num_slots, bytes_per_slot] uint8: a slot's states of all layers lie together
    _slot_memory: Tensor | None = None

    def widened(self, logits: Tensor) -> Tensor:
        """Own logits by the target's token ids, valid until the next call. [N, V'] -> [N, V]"""
        return logits if self.token_map is None else self.token_map.widened(logits)

    @property
    @abstractmethod
    def attentions(self) -> Sequence[PagedAttention]:
        """In the order of the layers."""

    @property
    def states(self) -> Sequence[SlotState]:
        """What its layers keep of whole sequences, in slots."""
        return ()

    def bytes_per_slot(self, max_drafts: int) -> int:
        """Of all its layers, if a step may have so many drafts of a sequence."""
        return sum(state.num_bytes(max_drafts, self.dtype) for state in self.states)

    def bind_states(self, num_slots: int, max_drafts: int) -> None:
        """Allocate what its layers keep in slots, in place of what they have."""
        for state in self.states:
            state.free()
        sizes = [state.num_bytes(max_drafts, self.dtype) for state in self.states]
        self._slot_memory = None
        self._slot_memory = torch.zeros(
            num_slots, sum(sizes), dtype=torch.uint8, device=self.device
        )
        for state, memory in zip(self.states, self._slot_memory.split(sizes, 1), strict=True):
            state.bind(memory, max_drafts, self.dtype)

    @property
    def slot_memory(self) -> Tensor:
        """What its layers keep in slots. Shape: [num_slots, bytes_per_slot] uint8."""
        assert self._slot_memory is not None, "states before they were bound"
        return self._slot_memory

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy what its layers keep in slots, from one to another, one after the other: the
        sequence in the second goes on from there. The first must cover its known tokens alone.
        """
        for source, target in copies:
            self.slot_memory[target].copy_(self.slot_memory[source])

    @property
    def weight_formats(self) -> str:
        """The formats of quantised weights; "" if all weights are in the dtype."""
        return ""

    def dtype_of_pages(self, layer: PagedAttention) -> torch.dtype:
        """The dtype of a layer's keys and values."""
        if self.cache_dtype is not None:
            return self.cache_dtype
        # Measured: with one query head a KV head, bfloat16 takes five times as long on a CPU.
        is_slow = self.device.type == "cpu" and layer.num_heads == layer.num_kv_heads
        return torch.float32 if is_slow else self.dtype

    def bytes_per_token(self, layer: PagedAttention) -> int:
        """KV cache bytes of one token in a layer."""
        num_numbers = layer.num_kv_heads * (layer.head_dim + layer.value_dim)
        return num_numbers * self.dtype_of_pages(layer).itemsize

    def bind_layer(self, layer: PagedAttention, num_pages: int, page_size: int) -> None:
        """Allocate a layer's part of a cache."""
        of_pages = self.dtype_of_pages(layer)
        layer.bind_pages(num_pages, page_size, of_pages, self.device, self.dtype)

    def bind_cache(self, num_pages: int, page_size: int) -> None:
        """Allocate a cache with one block table for all layers, and one slot."""
        self.bind_states(1, 0)
        for layer in self.attentions:
            self.bind_layer(layer, num_pages, page_size)

    def free_cache(self) -> None:
        """Free the cache, if there is one."""
        for layer in self.attentions:
            layer.pages = None
        for state in self.states:
            state.free()
        self._slot_memory = None


class Pass(NamedTuple):
    """The output of a forward pass; valid until the next one."""

    logits: Tensor  # [num_logits, V]
    taps: Tensor | None = None  # [T, num_taps, hidden] residual stream after the tapped layers
    rows: BatchRows | None = None  # of the taps, including padding
    shape: Shape | None = None  # (sequences, rows, logits), including padding


class Network(PagedLayers):
    """A causal LM over its pages, and the graphs of its passes."""

    name: str  # of its architecture
    max_positions: int  # of the longest sequence that it computes correctly
    has_followers: bool = False  # whether other processes run its passes, too
    batch_invariant: bool = False  # whether the bits of a row do not depend on the batch
    attention_is_batch_invariant: bool = False  # whether its attention needs no proof of that
    output_layer: Linear  # computes logits from normalised states, also for heads that share it
    tapped_layers: tuple[int, ...] = ()  # a pass hands out their residual streams; set by `tap`
    _logits: Tensor | None = None  # [max_rows, V]

    @property
    @abstractmethod
    def input_embedding(self) -> Tensor:
        """The embedding matrix. Shape: [V, hidden]."""

    @property
    @abstractmethod
    def num_layers(self) -> int: ...

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of few rows reads: all but most of the embeddings."""

    @property
    def host_bound_rows(self) -> int:
        """Up to so many rows a host takes longer to launch a pass than a GPU to compute it; beyond
        them a graph of it saves nothing.
        """
        rows = _ROW_BYTES_A_LAYER * self.num_layers // max(1, self.weight_bytes)
        return max(_LEAST_HOST_BOUND, rows)

    @property
    @abstractmethod
    def products_are_batch_invariant(self) -> bool:
        """Whether in every product the bits of a row do not depend on the batch."""

    @abstractmethod
    def __call__(self, batch: ForwardBatch) -> Pass: ...

    def tap(self, layers: Sequence[int]) -> None:
        """From now on, hand out the residual stream after these layers, for every row, in the order
        of the layers.

        -1 means the embeddings; the number of layers means the states after the last norm. Raises
        ValueError naming the valid layers.
        """
        last = self.num_layers - 1
        if not all(-1 <= layer <= last + 1 for layer in layers):
            raise ValueError(f"cannot tap layers {list(layers)}: there are 0 to {last}")
        self.tapped_layers = tuple(sorted(layers))

    def take_vocabulary(self, vocabulary: DraftVocabulary) -> None:
        """From now on, read tokens by the target's ids, and have logits by these."""
        num_embeddings = len(self.input_embedding)
        self.token_map = TokenMap.of(vocabulary, self.vocab_size, num_embeddings, self.device)
        self.vocab_size = self.token_map.width

    def own_ids(self, input_ids: Tensor) -> Tensor:
        """The ids that its embedding has rows for. Shape: [T] -> [T]."""
        return input_ids if self.token_map is None else self.token_map.read(input_ids)

    def reserve_logits(self, max_rows: int) -> Tensor:
        """Write up to `max_rows` rows of logits to one fixed tensor, for all shapes of passes.

        Graphs that read logits then need no copy, and the graphs of all shapes share the tensor.
        Shape: [max_rows, V]
        """
        if self.token_map is not None:
            return self.token_map.reserve(max_rows, self.dtype)[:max_rows]
        if self._logits is None or len(self._logits) < max_rows:
            self._logits = torch.empty(
                max_rows, self.vocab_size, dtype=self.dtype, device=self.device
            )
        return self._logits[:max_rows]

    def reserve_taps(self, max_rows: int) -> None:
        """Hand out the residual streams of up to `max_rows` rows in one fixed tensor, if it can:
        with a tensor for each shape, the graphs of a large model keep half a gigabyte.
        """

    def place_of_logits(self, num_rows: int) -> Tensor | None:
        """The tensor to write this many rows of logits to; None: allocate a new one.

        Shape: -> [num_rows, V].
        """
        if self._logits is None or num_rows > len(self._logits):
            return None
        return self._logits[:num_rows]

    def bind_slots(self, slots: Slots) -> None:
        """Look up the rows of batches in these slots, and keep states there; drops all captured
        passes.
        """
        self._slots = slots
        self.bind_states(slots.num_states, slots.max_drafts)
        self.phase.drop()

    @functools.cached_property
    def phase(self) -> Phase[Pass]:
        return Phase(self.run, self.device)

    @property
    def captured(self) -> dict[Shape, Captured[Pass]]:
        """The captured passes by (sequences, rows, logits), the largest first."""
        return self.phase.captured

    def capture(
        self,
        rows_per_seq: int,
        most_rows: int,
        every_row_has_logits: bool,
        report: ReportCounts,
        *,
        most_rows_per_seq: int = 0,
    ) -> Tensor:
        """Capture passes of up to `rows_per_seq` rows a sequence, some of up to
        `most_rows_per_seq`, and passes with prompts, up to `most_rows` rows; cache and slots must
        be bound.

        Every row gets logits, or one row a sequence. Returns where the logits of all shapes begin,
        as long as the most of them. What there is no memory for is not captured. Raises
        UnsupportedModelError if the model's own code waits for the GPU.
        """
        shapes = captured_shapes(
            self._slots.max_num_seqs,
            rows_per_seq,
            most_rows,
            every_row_has_logits,
            most_rows_per_seq,
            self.host_bound_rows,
        )
        num_logits = max(logits for _, _, logits in shapes)
        place = self.reserve_logits(num_logits)
        self.reserve_taps(max(rows for _, rows, _ in shapes))
        for done, shape in enumerate(shapes):
            report(done, len(shapes))
            empty = HostBatch.build(NONE_NP, NONE_NP, NONE_NP, NONE_NP)
            packed = empty.packed(shape[0], self._slots.dummy)
            try:
                self.phase.capture(packed, shape)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as reason:
                raise UnsupportedModelError(
                    f"{self.name} in {self.dtype} cannot be captured as a CUDA "
                    f"graph ({reason}); run it with engine.enforce_eager, or in another dtype"
                ) from reason
        for captured in self.captured.values():
            logits = captured.output.logits
            assert logits.data_ptr() == place.data_ptr(), "graphs that read logits read them there"
        return place

    def rehearse(self, num_rows: int, num_logits: int) -> Pass:
        """Run a pass of dummy sequences, as long as they can be."""
        longest = min(self.max_positions, self._slots.max_model_len)
        lens = [min(longest, num_rows - first) for first in range(0, num_rows, longest)]
        return self.forward(HostBatch.dummies(self._slots.dummy, lens, num_logits))

    def rehearse_short(self, num_seqs: int, num_rows: int) -> Pass:
        """Run a pass of dummy sequences of `num_rows` rows each."""
        return self.forward(HostBatch.dummies(self._slots.dummy, [num_rows] * num_seqs, num_seqs))

    def forward(self, batch: HostBatch) -> Pass:
        """Compute the batch's rows, and store their KV in the pages."""
        shape = self.phase.padded(batch.shape)
        integers = batch.integers(shape[0], self._slots.dummy, self.device)
        computed = self.phase(integers, shape)
        _, _, num_logits = batch.shape
        return computed._replace(logits=computed.logits[:num_logits], shape=shape)

    def padded(self, num_seqs: int, num_rows: int) -> tuple[int, int]:
        """The sequences and rows that are computed for so many, if every row has logits."""
        size, rows, _ = self.phase.padded((num_seqs, num_rows, num_rows))
        return size, rows

    def run(self, packed: Tensor, shape: Shape) -> Pass:
        """The captured part of `forward`, over a batch packed to this shape."""
        batch = ForwardBatch.unpack(packed, shape, self._slots)
        batch.batch_invariant = self.batch_invariant
        computed = self(batch)
        return computed if computed.taps is None else computed._replace(rows=batch.rows)


def captured_shapes(
    max_num_seqs: int,
    rows_per_seq: int,
    most_rows: int,
    every_row_has_logits: bool,
    most_rows_per_seq: int = 0,
    host_bound_rows: int = _LEAST_HOST_BOUND,
) -> list[Shape]:
    """(sequences, rows, logits) to capture, the largest first.

    A few sequences may have more than `rows_per_seq` rows each, up to `most_rows_per_seq`. Where
    all have, there are so many rows that the steps of _ROWS_STEP are close enough. With prompts a
    pass may have up to `host_bound_rows`.
    """

    def shape_of(num_seqs: int, num_rows: int) -> Shape:
        # At least a row for each sequence; verification reads up to one padding row for each.
        rows = min(num_rows, max(most_rows, num_seqs))
        logits = min(num_rows, most_rows + num_seqs) if every_row_has_logits else num_seqs
        return num_seqs, rows, logits

    def takes_long(num_seqs: int, rows: int) -> bool:
        return rows_per_seq < rows <= most_rows_per_seq and num_seqs * rows <= MOST_LOOKED_UP_ROWS

    usual = [r for r in range(rows_per_seq, 0, -1) if r <= 8 or r in (rows_per_seq, *_LONG_ROWS)]
    most = max_num_seqs * rows_per_seq
    num_logits = shape_of(max_num_seqs, most)[2]
    shapes = [
        *(
            (max_num_seqs, min(rows, most_rows), num_logits)
            for rows in reversed(_prompt_rows(min(most_rows, host_bound_rows)))
            if min(rows, most_rows) > most
        ),
        *(
            shape_of(n, n * rows)
            for n in padded_sizes(max_num_seqs)
            for rows in (*(r for r in _LONG_ROWS if takes_long(n, r)), *usual)
        ),
    ]
    return list(dict.fromkeys(shapes))


def _prompt_rows(most: int) -> list[int]:
    """Rows of captured passes with prompts, ascending; the last of them holds `most`."""
    rows = [_ROWS_STEP]
    while rows[-1] < most:
        rows.append(rows[-1] + max(_ROWS_STEP, 1 << rows[-1].bit_length() - 4))
    return rows


def short_batches(max_num_seqs: int, most_rows: int, rows_per_seq: int) -> list[tuple[int, int]]:
    """(sequences, rows of each) of small passes that together launch every kernel of a model.

    Of many sequences, more than `rows_per_seq` rows each count as a prompt; so many do not.
    """
    batches = [
        *(
            (num_seqs, num_rows)
            for num_seqs in padded_sizes(max_num_seqs)
            for num_rows in (*_SHORT_ROWS, min(rows_per_seq, _SHORT_ROWS[0]))
        ),
        # All sizes of tiles that a product of some rows has.
        *((8, sum(rows) // 8) for rows in TILE_ROWS if max_num_seqs >= 8),
    ]
    return [batch for batch in dict.fromkeys(batches) if math.prod(batch) <= most_rows]

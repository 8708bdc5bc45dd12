"""Attention of one layer over its pages, and the batch that the layers of a pass share."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.attention_items import AttentionItems, list_items
from outrider.kernels.model.attention_reference import (
    KEY_BLOCK,
    RowBlock,
    paged_attention_reference,
    row_blocks,
    whole_block,
)
from outrider.kernels.model.attention_trial import try_warpgroup_attention
from outrider.kernels.model.batch_invariant_attention import Heads
from outrider.kernels.model.paged_attention import paged_attention
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.rope import rope_and_store, rotary_table
from outrider.kernels.model.rows import BatchRows, lay_out, places_of

from ..state.phase import Shape
from ..state.slots import Slots
from .admission import UnsupportedModelError

# Sequences whose looked-up drafts are verified have so many rows together, at most.
MOST_LOOKED_UP_ROWS = 256


class KVPages(NamedTuple):
    """Keys and values of an attention layer: [num_pages, page_size, num_kv_heads, dim] each."""

    keys: Tensor
    values: Tensor


class Rope(NamedTuple):
    """Rotary embedding of positions: angles are position * inv_freq."""

    inv_freq: Tensor  # [rotary_dim / 2] float32; the first rotary_dim of a key head are rotated
    scaling: float  # of cos and sin


class SequenceRows(NamedTuple):
    """The rows of one sequence in a batch, and the pages that they attend to."""

    rows: slice
    num_tokens: int  # tokens that its last row attends to
    pages: Tensor | slice  # of these tokens; a slice, without a copy, if they are consecutive
    behind: list[int]  # places in its last page after these tokens, in the same block of keys


@dataclass(eq=False)
class ForwardBatch:
    """A HostBatch on the device: its rows, with absolute positions, and the tokens they read.

    What several layers of a pass need of it is computed once. With `batch_invariant`, the bits of a
    row of attention do not depend on the batch.
    """

    # [T]
    input_ids: Tensor
    rows: BatchRows
    # [num_logits]
    logits_rows: Tensor
    # [num_groups, num_slots, pages]
    block_tables: Tensor
    page_size: int
    # [num_slots] known tokens of each sequence; rows at these positions or beyond are of drafts
    num_tokens: Tensor
    batch_invariant: bool = False
    # How many rows decodes and verifications of so many sequences have at most; None: any number
    most_decoding: int | None = None
    # [B] how many of each sequence's last rows get logits; None: not known
    num_logits: Tensor | None = None

    def __post_init__(self) -> None:
        self._blocks: dict[tuple[int, int, int | None, int, int, bool], list[RowBlock]] = {}
        self._items: dict[tuple[int, int], AttentionItems] = {}
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self._places = {0: self.rows.places}
        self._sequences: dict[int, tuple[list[SequenceRows], Tensor | None]] = {}

    @staticmethod
    def of_next_tokens(rows: BatchRows, slots: Slots) -> "ForwardBatch":
        """The same rows, each with the token after its own as input; no row gets logits."""
        # Shifted by a view: adding 1 to positions would be a launch.
        input_ids = slots.token_ids[:, 1:][rows.slot_of_row, rows.positions].long()
        no_logits = rows.slots[:0]
        return ForwardBatch(
            input_ids,
            rows,
            no_logits,
            slots.block_tables,
            slots.page_size,
            slots.num_tokens,
            most_decoding=_most_decoding(len(rows.slots), slots),
        )

    @staticmethod
    def unpack(packed: Tensor, shape: Shape, slots: Slots, ahead: int = 0) -> "ForwardBatch":
        """The batch of `HostBatch.packed`; a row reads the token `ahead` places after its own.

        Shape: packed [packed_len(num_seqs)].
        """
        num_seqs, num_rows, num_logits = shape
        sequences = packed.view(4, -1)[:, :num_seqs]
        rows, input_ids, logits_rows = lay_out(
            sequences,
            num_rows,
            num_logits,
            slots.num_tokens,
            slots.token_ids,
            slots.block_tables[0],
            slots.page_size,
            ahead,
        )
        return ForwardBatch(
            input_ids,
            rows,
            logits_rows,
            slots.block_tables,
            slots.page_size,
            slots.num_tokens,
            most_decoding=_most_decoding(num_seqs, slots),
            num_logits=sequences[3],
        )

    @property
    def holds_prompt(self) -> bool:
        """Whether some rows must be of a prompt."""
        return self.most_decoding is not None and len(self.rows.positions) > self.most_decoding

    def of_logits(self) -> "KeptRows":
        """The rows that get logits."""
        assert self.num_logits is not None
        bounds = F.pad(self.num_logits.cumsum(0), (1, 0))
        return self.keeping(self.logits_rows, self.rows.seq_lens, bounds)

    def keeping(self, rows: Tensor, seq_lens: Tensor, bounds: Tensor) -> "KeptRows":
        """These rows alone, of each sequence some that follow one another.

        Shape: rows [N]; seq_lens [B], up to each sequence's last of them; bounds [B + 1]
        """
        own = self.rows
        places = own.slot_of_row[rows], own.positions[rows], own.places[rows]
        batch = replace(self, rows=BatchRows(*places, own.slots, seq_lens, bounds))
        return KeptRows(rows, batch)

    def rotary(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every row. Shape: [T, rotary_dim] each."""
        key = id(rope.inv_freq)
        if key not in self._rotary:
            self._rotary[key] = rotary_table(self.rows.positions, *rope, dtype)
        return self._rotary[key]

    def places(self, layer: "PagedAttention") -> Tensor:
        """Where each row's KV goes in a layer's pages: page * page_size + offset. Shape: [T]."""
        if layer.group not in self._places:
            self._places[layer.group] = places_of(
                self.rows.slot_of_row,
                self.rows.positions,
                self.block_tables[layer.group],
                self.page_size,
            )
        return self._places[layer.group]

    def items(self, layer: "PagedAttention") -> AttentionItems:
        """The list of work for the attention kernel, for layers with as many heads."""
        key = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        if key not in self._items:
            rows = self.rows
            self._items[key] = list_items(
                rows.cu_seqlens_q,
                rows.seq_lens,
                rows.slots,
                len(rows.positions),
                *key,
                self.block_tables.shape[2] * self.page_size,
                batch_invariant=self.batch_invariant,
                holds_prompt=self.holds_prompt,
            )
        return self._items[key]

    def sequences(self, layer: "PagedAttention") -> tuple[list[SequenceRows], Tensor | None]:
        """The sequences of the batch that have rows, for attention without a kernel; and places
        after them that it reads nevertheless, if there are any.
        """
        if layer.group not in self._sequences:
            sequences = self._in_pages(self.block_tables[layer.group])
            behind = [place for seq in sequences for place in seq.behind]
            is_read = self.batch_invariant and behind
            self._sequences[layer.group] = sequences, torch.tensor(behind) if is_read else None
        return self._sequences[layer.group]

    def _in_pages(self, block_table: Tensor) -> list[SequenceRows]:
        bounds, seq_lens = self.rows.cu_seqlens_q.tolist(), self.rows.seq_lens.tolist()
        sequences = []
        for i, slot in enumerate(self.rows.slots.tolist()):
            begin, end, num_tokens = bounds[i], bounds[i + 1], seq_lens[i]
            if begin < end:
                page_ids = block_table[slot, : -(-num_tokens // self.page_size)]
                ids = page_ids.tolist()
                are_consecutive = ids == list(range(ids[0], ids[0] + len(ids)))
                pages = slice(ids[0], ids[-1] + 1) if are_consecutive else page_ids
                behind = _behind(num_tokens, ids[-1], self.page_size)
                sequences.append(SequenceRows(slice(begin, end), num_tokens, pages, behind))
        return sequences

    def blocks(self, seq: SequenceRows, layer: "PagedAttention", like: Tensor) -> list[RowBlock]:
        """A sequence's rows with their masks, of the dtype of `like`."""
        window, group = layer.window, layer.num_heads // layer.num_kv_heads
        query_len = seq.rows.stop - seq.rows.start
        key = (query_len, seq.num_tokens, window, group, layer.rows_at_once, layer.causal)
        if key not in self._blocks:
            assert layer.causal or not self.batch_invariant, "a row would depend on those after it"
            args = (query_len, seq.num_tokens, window, group, like.dtype, like.device)
            if self.batch_invariant:
                self._blocks[key] = row_blocks(*args, layer.rows_at_once)
            else:
                self._blocks[key] = whole_block(*args, causal=layer.causal)
        return self._blocks[key]


class KeptRows(NamedTuple):
    """Rows of a batch whose outputs are read: a last layer need not compute the others."""

    rows: Tensor  # [N], of the batch
    batch: ForwardBatch  # of these alone, for what attends


def _most_decoding(num_seqs: int, slots: Slots) -> int:
    """How many rows a batch without prompts has at most.

    A captured pass with prompts has room for all sequences, so its rows are few for each. Divided
    among them as decodes are, the partial sums of 4096 rows over long sequences take gigabytes.
    """
    return max(MOST_LOOKED_UP_ROWS, num_seqs * (slots.max_drawn + 1))


def _behind(num_tokens: int, last_page: int, page_size: int) -> list[int]:
    """Places in the last page from the end of the tokens to the end of their block of keys."""
    num_in_page = (num_tokens - 1) % page_size + 1
    num_left = min(-num_tokens % KEY_BLOCK, page_size - num_in_page)
    first = last_page * page_size + num_in_page
    return list(range(first, first + num_left))


@dataclass(slots=True)
class PagedAttention:
    """Attention of one layer over its pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # how many tokens a row sees, including itself
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]
    k_scale: float = 1.0  # in FP8 pages, keys are divided by this
    v_scale: float = 1.0  # and values by this
    causal: bool = True  # if False, every row sees its sequence to the last token
    pages: KVPages | None = None
    group: int = 0  # of layers that share a block table
    rows_at_once: int = KEY_BLOCK  # on a CPU, of a target that keeps its bits

    def __post_init__(self) -> None:
        """Raises UnsupportedModelError if no rows attend so."""
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads"
            )
        if isinstance(self.scale, complex):  # a power of a negative number
            raise UnsupportedModelError(f"its attention multiplies scores by {self.scale}")
        if self.window is not None and self.window < 1:
            raise UnsupportedModelError(
                f"its layers attend to a window of {self.window} tokens; it must have 1 or more"
            )

    @property
    def heads(self) -> Heads:
        """Its shape, from which `batch_invariant_attention` knows in which order it sums."""
        return Heads(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.value_dim,
            self.window,
            self.softcap,
            self.sinks is not None,
        )

    def bind_pages(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        dtype_of_rows: torch.dtype,
    ) -> None:
        """Allocate this layer's part of a cache, and find out by which kernels its rows attend."""
        if self.causal and self.softcap is None:
            try_warpgroup_attention(self.heads, page_size, dtype_of_rows, dtype, device)
        # Not zeroed: a CPU, which reads past a sequence's length, clears that part before. But it
        # reads the first page where a window has passed a page, and weighs it by 0.
        shape = (num_pages, page_size, self.num_kv_heads)
        self.pages = KVPages(
            torch.empty(*shape, self.head_dim, dtype=dtype, device=device),
            torch.empty(*shape, self.value_dim, dtype=dtype, device=device),
        )
        for pages in self.pages:
            pages[0].zero_()

    @property
    def bound_pages(self) -> KVPages:
        assert self.pages is not None, "attention before its pages were bound"
        return self.pages

    def store(
        self,
        qkv: Tensor,
        num_heads: int,
        rope: Rope,
        head_norms: tuple[Norm, Norm] | None,
        batch: ForwardBatch,
        *,
        gated: bool = False,
    ) -> Tensor:
        """Store keys and values in the pages; returns the rotated queries, if the rows have any.

        `gated`: behind each query head lies its gate.
        Shape: qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> [T, num_heads, head_dim]
        """
        q_norm, k_norm = head_norms or (None, None)
        return rope_and_store(
            qkv,
            *batch.rotary(rope, qkv.dtype),
            *self.bound_pages,
            batch.places(self),
            num_heads,
            q_norm,
            k_norm,
            self.k_scale,
            self.v_scale,
            gated=gated,
        )

    def __call__(self, query: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend over the pages, which must already hold the KV of these rows.

        Shape: query [T, num_heads, head_dim] -> [T, num_heads, value_dim]
        """
        keys, values = self.bound_pages
        if uses_triton(query):
            return paged_attention(
                query,
                keys,
                values,
                batch.items(self),
                batch.block_tables[self.group],
                self.scale,
                self.window,
                self.softcap,
                self.sinks,
                self.k_scale,
                self.v_scale,
                causal=self.causal,
            )
        sequences, behind = batch.sequences(self)
        if behind is not None:  # rejected drafts or earlier owners may have left NaN there
            for pages in (keys, values):
                pages.flatten(0, 1).index_fill_(0, behind, 0)
        outs = [
            paged_attention_reference(
                query[seq.rows],
                keys,
                values,
                seq.pages,
                batch.blocks(seq, self, keys),
                self.scale,
                self.softcap,
                self.sinks,
            )
            for seq in sequences
        ]
        num_padding = len(query) - sum(map(len, outs))
        if num_padding:
            outs.append(query.new_zeros(num_padding, self.num_heads, self.value_dim))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

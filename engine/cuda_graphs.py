"""Forward passes of few rows a sequence as CUDA graphs: one launch instead of a thousand.

A graph is captured once for each padded shape: a power of two of sequences, times the rows that a
plain decode, a catch-up or a verification brings. Padded rows belong to no sequence and write to
the dummy page. Prefill and whatever else fits no shape runs eagerly.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import ForwardBatch
from outrider.engine.kv_cache import DUMMY_PAGE


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch  # views of the static inputs
    logits: Tensor  # [num_rows, V], overwritten by every replay


class GraphedForward:
    """Replays `forward` for batches that fit a captured shape."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        max_num_seqs: int,
        rows_per_seq: tuple[int, ...],
        block_table: Tensor,
    ) -> None:
        self._forward = forward
        self._block_table = block_table
        self._rows_per_seq = sorted(set(rows_per_seq))
        self._num_seqs = [2**i for i in range((max_num_seqs - 1).bit_length())] + [max_num_seqs]
        self._captured: dict[tuple[int, int], _Captured] = {}
        max_rows = max_num_seqs * self._rows_per_seq[-1]

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=block_table.device)

        # The static inputs; a captured shape reads the front of each.
        self._input_ids = zeros(max_rows, dtype=torch.int64)
        self._positions = zeros(max_rows, dtype=torch.int64)
        self._slot_mapping = zeros(max_rows, dtype=torch.int64)
        self._cu_seqlens_q = zeros(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = zeros(max_num_seqs, dtype=torch.int32)
        self._slots = zeros(max_num_seqs, dtype=torch.int64)
        self._logits_rows = torch.arange(max_rows, device=block_table.device)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(sequences, rows) to capture, the largest first: its memory serves the others."""
        return sorted(
            ((n, n * r) for n in self._num_seqs for r in self._rows_per_seq), reverse=True
        )

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture every shape; `progress(done, total)` is called along the way."""
        pool = None
        for done, (num_seqs, num_rows) in enumerate(self.shapes):
            progress(done, len(self.shapes))
            batch = self._static_batch(num_seqs, num_rows)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles kernels and makes handles, uncaptured
                self._forward(batch)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._forward(batch)
            pool = graph.pool()
            self._captured[num_seqs, num_rows] = _Captured(graph, batch, logits)

    def replay(self, batch: ForwardBatch) -> Tensor | None:
        """The batch's logits [num_logits, V], or None where no captured shape holds it."""
        num_seqs, num_rows = len(batch.seq_lens), len(batch.input_ids)
        captured = self._fit(num_seqs, num_rows)
        if captured is None:
            return None
        static = captured.batch
        for given, fixed, padding in (
            (batch.input_ids, static.input_ids, 0),
            (batch.positions, static.positions, 0),
            (batch.slot_mapping, static.slot_mapping, DUMMY_PAGE),
            (batch.cu_seqlens_q, static.cu_seqlens_q, num_rows),
            (batch.seq_lens, static.seq_lens, 0),
            (batch.slots, static.slots, 0),
        ):
            fixed[: len(given)] = given
            fixed[len(given) :] = padding
        captured.graph.replay()
        return captured.logits[batch.logits_rows]

    def _fit(self, num_seqs: int, num_rows: int) -> _Captured | None:
        padded_seqs = next((n for n in self._num_seqs if n >= num_seqs), None)
        if padded_seqs is None:
            return None
        rows = (padded_seqs * r for r in self._rows_per_seq)
        padded_rows = next((n for n in rows if n >= num_rows), None)
        return None if padded_rows is None else self._captured.get((padded_seqs, padded_rows))

    def _static_batch(self, num_seqs: int, num_rows: int) -> ForwardBatch:
        # One row a sequence, so that the captured kernels meet lengths they can run on.
        rows = torch.arange(num_seqs + 1, device=self._cu_seqlens_q.device)
        self._cu_seqlens_q[: num_seqs + 1] = rows
        self._seq_lens[:num_seqs] = 1
        lens_np = np.ones(num_seqs, dtype=np.int64)
        return ForwardBatch(
            input_ids=self._input_ids[:num_rows],
            positions=self._positions[:num_rows],
            slot_mapping=self._slot_mapping[:num_rows],
            cu_seqlens_q=self._cu_seqlens_q[: num_seqs + 1],
            seq_lens=self._seq_lens[:num_seqs],
            slots=self._slots[:num_seqs],
            block_table=self._block_table,
            logits_rows=self._logits_rows[:num_rows],
            query_lens_np=lens_np,
            seq_lens_np=lens_np,
        )

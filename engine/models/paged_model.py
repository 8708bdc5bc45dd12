"""One model of the pair over its own paged KV cache."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..state.batch import ForwardBatch, HostBatch
from ..state.phase import Captured, Phase, Shape, padded_sizes
from ..state.ragged import NONE_NP
from ..state.slots import Slots
from .admission import UnsupportedModelError, max_positions
from .attention import PassContext
from .checkpoint import Progress
from .compiled_decoder import CompiledDecoder
from .network import Network, Pass

# Passes with prompts are captured in steps of _ROWS_STEP rows, up to _MOST_ROWS. With more rows a
# GPU takes longer to compute the pass than the host to launch its kernels, so no graph is needed.
_ROWS_STEP = 128
_MOST_ROWS = 1024


class PagedModel:
    """A causal LM over its pages, and the graphs of its passes."""

    def __init__(self, network: Network, hf_config: PreTrainedConfig) -> None:
        """As `load_network` returns them."""
        self.network = network
        self.dtype, self.vocab_size = network.dtype, network.vocab_size
        self.max_positions = max_positions(hf_config)
        self._name = hf_config.model_type
        self._phase = Phase(self.run, network.device)

    def bind_slots(self, slots: Slots) -> None:
        """Look up the rows of batches in these slots; drops all captured passes."""
        self._slots = slots
        self._phase.drop()

    @property
    def captured(self) -> dict[Shape, Captured[Pass]]:
        """The captured passes by (sequences, rows, logits), the largest first."""
        return self._phase.captured

    def capture(
        self, rows_per_seq: int, most_rows: int, every_row_has_logits: bool, progress: Progress
    ) -> Tensor:
        """Capture passes of up to `rows_per_seq` rows a sequence, and passes with prompts, up to
        `most_rows` rows; cache and slots must be bound.

        Every row gets logits, or one row a sequence. Returns the logits of the largest shape;
        those of the other shapes begin at the same address, unless the model computes them outside
        its head. Raises UnsupportedModelError if the model's own code waits for the GPU.
        """
        shapes = captured_shapes(
            self._slots.max_num_seqs, rows_per_seq, most_rows, every_row_has_logits
        )
        self.network.reserve_logits(shapes[0][2])
        for done, shape in enumerate(shapes):
            progress(done, len(shapes))
            empty = HostBatch.build(NONE_NP, NONE_NP, NONE_NP, NONE_NP)
            packed = empty.packed(shape, self._slots.dummy)
            try:
                self._phase.capture(packed, shape)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as reason:
                raise UnsupportedModelError(
                    f"{self._name} in {self.dtype} cannot be captured as a CUDA "
                    f"graph ({reason}); run it with engine.enforce_eager, or in another dtype"
                ) from reason
        return self.captured[shapes[0]].output.logits

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
        if isinstance(self.network, CompiledDecoder):
            return self.network.pass_in_slots(batch, self._slots)
        smallest_first = reversed(self.captured)
        shape = next((s for s in smallest_first if _holds(s, batch.shape)), None)
        shape = shape or batch.shape
        computed = self._phase(batch.packed(shape, self._slots.dummy), shape)
        _, _, num_logits = batch.shape
        return computed._replace(logits=computed.logits[:num_logits], shape=shape)

    def run(self, packed: Tensor, shape: Shape) -> Pass:
        """The captured part of `forward`, over a batch packed to this shape."""
        batch = ForwardBatch.unpack(packed, shape, self._slots)
        computed = self.network(PassContext(batch, batch_invariant=self.network.batch_invariant))
        return computed if computed.taps is None else computed._replace(rows=batch.rows)


def captured_shapes(
    max_num_seqs: int, rows_per_seq: int, most_rows: int, every_row_has_logits: bool
) -> list[Shape]:
    """(sequences, rows, logits) to capture, the largest first."""

    def shape_of(num_seqs: int, num_rows: int) -> Shape:
        # At least a row for each sequence; verification reads up to one padding row for each.
        rows = min(num_rows, max(most_rows, num_seqs))
        logits = min(num_rows, most_rows + num_seqs) if every_row_has_logits else num_seqs
        return num_seqs, rows, logits

    most = max_num_seqs * rows_per_seq
    steps = range(most // _ROWS_STEP * _ROWS_STEP + _ROWS_STEP, _MOST_ROWS + 1, _ROWS_STEP)
    num_logits = shape_of(max_num_seqs, most)[2]
    shapes = [
        *(
            (max_num_seqs, min(rows, most_rows), num_logits)
            for rows in reversed(steps)
            if min(rows, most_rows) > most
        ),
        *(
            shape_of(n, n * rows)
            for n in padded_sizes(max_num_seqs)
            for rows in range(rows_per_seq, 0, -1)
        ),
    ]
    return list(dict.fromkeys(shapes))


def _holds(shape: Shape, wanted: Shape) -> bool:
    return all(size >= needed for size, needed in zip(shape, wanted, strict=True))

"""Runs the verification kernels on a step's logits: what is accepted, and what follows."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.verify import cpu
from outrider.kernels.verify.logprobs import Logprobs, gather_logprobs
from outrider.kernels.verify.verify import verify

from ..api import MAX_LOGPROBS
from ..logit_edits import LogitEdits, RequestRows
from ..plan import SAMPLING_KINDS, Plan, slots_of
from ..state.host_copy import on_host, uploaded
from ..state.phase import Phase, Shape, padded_sizes
from ..state.ragged import NONE_NP, aligned
from ..state.slots import DraftDistributions, Slots
from .edited_sequences import EditedVerification
from .logprobs import to_entries, with_named

# Of the logits whose logprobs are gathered: bounds the memory of their copies.
GATHERED_ROWS = 512


class Verifier:
    """Keeps exactly those drafts that the target would have produced itself."""

    def __init__(
        self, slots: Slots, edits: LogitEdits, distributions: DraftDistributions | None
    ) -> None:
        """Drafts were drawn from `distributions`; None: they are one-hot."""
        self._slots = slots
        self._edits = edits
        self._distributions = distributions
        self._phase = Phase(self._run, slots.device)
        self._edited = EditedVerification(slots, edits, self._run, self._pack)
        self.phases = self._phase, self._edited.phase

    def warm_ups(self, logits: Tensor) -> Iterator[Callable[[], Tensor]]:
        """Dummy verifications that together launch every kernel, also those for edited logits.

        Shape: logits [2 * (K + 1), V].
        """
        integers = uploaded(self._dummies(2), self._slots.device)
        both = logits, logits.float()
        for x, kind in product(both, SAMPLING_KINDS):
            yield partial(self._run, integers, (2, self._slots.max_drafts, *kind), x)
        yield partial(self._edits.rehearse, logits)
        yield partial(self._edited.rehearse, logits)

    def rehearse(self, logits: Tensor) -> None:
        """Verify dummy sequences, with edits and with as many logprobs as requests may ask for.

        Shape: logits [max_verified or fewer, V].
        """
        size = min(self._slots.max_num_seqs, len(logits))
        integers = uploaded(self._dummies(size), self._slots.device)
        self._run(integers, (size, self._slots.max_drafts, True, True), logits)
        self._edited.rehearse(logits)
        row = torch.arange(len(logits), device=logits.device)
        num_top = min(MAX_LOGPROBS, self._slots.vocab_size)
        for some in row.split(GATHERED_ROWS):
            gather_logprobs(logits[some], 0 * some, num_top, self._slots.vocab_size)

    def capture(self, logits: Tensor) -> None:
        """Capture verifications that read this `logits` tensor, of no more rows than it has.

        Shape: logits [max_num_seqs or more, V].
        """
        for size in padded_sizes(self._slots.max_num_seqs):
            for kind in SAMPLING_KINDS:
                for most in sorted({self._slots.max_drawn, self._slots.max_drafts}, reverse=True):
                    tensors = (logits[: size * (most + 1)],)
                    self._phase.capture(self._dummies(size), (size, most, *kind), tensors)
        self._edited.capture(logits)

    def verify(self, plan: Plan, logits: Tensor) -> list[np.ndarray] | None:
        """Verify all emitting sequences at once; logits: [sum(k_i + 1), V], rows in plan order.

        Writes the drawn tokens into the slots, after each sequence's known tokens, and starts
        copying to the host what `read` needs: [B, K + 2] tokens; what was chosen, if anything was;
        all drafts [B, K], if any request `returns_drafts`; Logprobs, if any request wants them.
        """
        emitting = plan.emitting
        if not emitting:
            return None
        slots_np, num_drafts_np = slots_of(emitting), plan.num_drafts_np
        chosen = () if plan.chosen is None else (plan.chosen.counts, plan.chosen.ranges)
        more = plan.chosen.counts if plan.chosen else None
        drafts = []
        wants = plan.wants
        if wants.drafts:  # before verification overwrites the rejected ones
            slot = uploaded(slots_np, self._slots.device)
            drafts = [self._slots.state.drafts(slot, self._slots.max_drafts)]
        kind = wants.filters, wants.draws
        edited_np = None
        if wants.edits:
            edited_np = self._edits.asked_by(slots_np)
            # Of a sequence that has ended, the host has forgotten what it needs.
            is_void_np = np.array([s.is_void for s in emitting])
            edited_np &= ~(is_void_np & self._edits.needing_host(slots_np))
        if edited_np is None or not edited_np.any():
            drawn = self._verify_slots(slots_np, num_drafts_np, kind, logits, more)
        else:
            if edited_np.all():
                shape = len(emitting), self._slots.max_drafts + 2
                drawn = torch.empty(shape, dtype=torch.int64, device=self._slots.device)
            else:  # the dummy slot takes the place of edited sequences
                others_np = np.where(edited_np, self._slots.dummy, slots_np)
                drawn = self._verify_slots(others_np, num_drafts_np, kind, logits, more)
            self._edited(drawn, slots_np, num_drafts_np, edited_np, kind, logits)
        logprobs = self._gather(plan, logits, drawn) if wants.logprobs else ()
        return on_host(drawn, *chosen, *drafts, *logprobs)  # the only copy that every step makes

    def _verify_slots(
        self,
        slots_np: np.ndarray,
        num_drafts_np: np.ndarray,
        kind: Shape,
        logits: Tensor,
        more: Tensor | None,
    ) -> Tensor:
        """Verify the requests in these slots, whose rows of logits follow in this order. The last N
        have `more` drafts.

        Shape: slots_np, num_drafts_np [B] int64; logits [sum(k_i + 1), V], more [N] -> [B, K + 2].
        """
        q, (_, draws) = self._distributions, kind
        if cpu.takes(logits, None if q is None else q.logits):
            if more is not None:
                num_drafts_np[-len(more) :] += more.numpy()
            return cpu.verify_arrays(
                self._slots.state,
                slots_np,
                num_drafts_np,
                self._slots.max_drafts,
                logits,
                self._slots.vocab_size,
                q if draws else None,
            )
        count = len(slots_np)
        # A graph for more rows of logits takes longer, also if they are not there.
        is_long = num_drafts_np.max() > self._slots.max_drawn
        most = self._slots.max_drafts if is_long else self._slots.max_drawn
        size, *_ = self._phase.padded((count,))
        # Each sequence of padding reads one more row. A step of much that was looked up has more
        # rows than any graph.
        num_rows = len(logits) + size - count
        if self._phase.holds((size, most, *kind), num_rows):
            packed = self._integers(slots_np, num_drafts_np, size, more)
            return self._phase(packed, (size, most, *kind), logits)[:count]
        packed = self._integers(slots_np, num_drafts_np, count, more)
        if isinstance(packed, np.ndarray):
            packed = uploaded(packed, self._slots.device)
        return self._run(packed, (count, most, *kind), logits)

    def read(self, plan: Plan, drawn: list[np.ndarray] | None) -> None:
        """Enter what `verify` drew in the plan of a step that has ended."""
        if drawn is None:
            return
        drawn_np, *others_np = drawn
        if plan.chosen is not None:
            plan.read_chosen(others_np.pop(0), others_np.pop(0))
        drafts_np = others_np.pop(0) if plan.wants.drafts else None
        first = 0  # row of the next sequence that wants logprobs
        counts_np = (drawn_np[:, :-1] >= 0).sum(1)  # mostly few of the columns
        rows, counts = drawn_np[:, : counts_np.max()].tolist(), counts_np.tolist()
        are_bad = (drawn_np[:, -1] != 0).tolist()
        for scheduled, row, count, is_bad in zip(plan.emitting, rows, counts, are_bad, strict=True):
            scheduled.token_ids, scheduled.is_bad = row[:count], is_bad
        if drafts_np is None and not others_np:
            return
        for i, scheduled in enumerate(plan.emitting):
            if drafts_np is not None and scheduled.request.wants.drafts:
                scheduled.draft_token_ids = drafts_np[i, : scheduled.num_drafts].tolist()
            num_top = scheduled.request.params.num_alternatives
            if num_top is not None:
                last = first + len(scheduled.token_ids)
                own_np = (field_np[first:last] for field_np in others_np)
                scheduled.logprobs = to_entries(*own_np, num_top=num_top)
                first += scheduled.num_drafts + 1

    def _run(self, integers: Tensor, shape: Shape, logits: Tensor) -> Tensor:
        """Verify, and write the drawn tokens into the slots.

        `shape` is (requests, most drafts of one, filters, draws).
        Shape: integers [3, B + 1 or more], see `_pack`; logits [T, V]; returns [B, K + 2]: K + 1
        tokens, padded with -1, and a flag for bad logits.
        """
        size, _, filters, draws = shape
        cu_rows, (slot, num_drafts) = integers[0, : size + 1], integers[1:, :size].unbind()
        # A plain step is one in which no sequence has drafts: it takes the same kernels.
        return verify(
            logits,
            cu_rows,
            self._slots.state,
            slot,
            num_drafts,
            self._slots.max_drafts,
            self._distributions,
            self._slots.vocab_size,
            filters=bool(filters),
            draws=bool(draws),
        )

    def _dummies(self, size: int) -> np.ndarray:
        return self._pack(NONE_NP, NONE_NP, size)

    def _pack(self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int) -> np.ndarray:
        """Pack the integers for `_run`, padded with plain decodes of the dummy slot.

        Arguments: [B] -> [3, size + 1 or more]. Row 0 holds cumulative rows of logits (B + 1), row
        1 slots (B), row 2 numbers of drafts (B).
        """
        packed = np.zeros((3, aligned(size + 1, itemsize=4)), dtype=np.int32)
        packed[1] = self._slots.dummy
        packed[1, : len(slots_np)] = slots_np
        packed[2, : len(num_drafts_np)] = num_drafts_np
        packed[0, 1:] = np.cumsum(packed[2, :-1] + 1)
        return packed

    def _integers(
        self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int, more: Tensor | None
    ) -> np.ndarray | Tensor:
        """As `_pack`, with `more` drafts of the last sequences: then on the device."""
        packed_np = self._pack(slots_np, num_drafts_np, size)
        if more is None:
            return packed_np
        packed, end = uploaded(packed_np, self._slots.device), len(slots_np)
        packed[2, end - len(more) : end] += more
        packed[0, 1:] = (packed[2, :-1] + 1).cumsum(0)
        return packed

    def _gather(self, plan: Plan, logits: Tensor, drawn: Tensor) -> Logprobs:
        """Raw logprobs of every row of the sequences that ask for them.

        Rows of rejected drafts are included: the host does not know yet which they are, and the
        next pass overwrites the logits. Shape: drawn [B, K + 2].
        """
        asking_np = np.array([s.request.wants.logprobs for s in plan.emitting])
        num_rows_np = plan.num_drafts_np + 1
        # In `drawn`, a sequence's row takes the place of its slot.
        rows = RequestRows.in_turn(np.arange(len(drawn)), num_rows_np)
        asking = rows.take(asking_np.repeat(num_rows_np))
        params = [s.request.params for s in plan.emitting]
        num_top = max(p.logprobs or 0 for p in params)
        num_top = min(num_top, self._slots.vocab_size)
        named = [p.logprob_token_ids for p in params]

        def found(row: Tensor, seq: Tensor, column: Tensor) -> Logprobs:
            asked, token_ids = logits[row], drawn[seq, column]
            best = gather_logprobs(asked, token_ids, num_top, self._slots.vocab_size)
            return with_named(best, asked, token_ids, named, seq) if any(named) else best

        pieces = uploaded(np.stack(asking), drawn.device).split(GATHERED_ROWS, 1)
        return Logprobs(*map(torch.cat, zip(*(found(*piece) for piece in pieces), strict=True)))

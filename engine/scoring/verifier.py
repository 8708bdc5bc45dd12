"""The verification kernels on a step's logits: which drafts stand, and the token after them."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.verify.logprobs import Logprobs, gather_logprobs
from outrider.kernels.verify.slot_rows import read_slots, write_verified
from outrider.kernels.verify.verify import verify

from ..api import MAX_LOGPROBS
from ..logit_edits import LogitEdits, RequestRows
from ..proposers.base import SAMPLING_KINDS, DraftDistributions, sampling_kind
from ..scheduling.plan import Plan, Verified, slots_of
from ..state.host_copy import HostCopy, uploaded
from ..state.phase import Phase, Shape, padded_size, padded_sizes
from ..state.ragged import aligned
from ..state.slots import Slots
from .prompt_logprobs import read_prompt_logprobs, to_entries


class Drawn(NamedTuple):
    """What a step drew, on its way to the host."""

    copy: HostCopy  # [B, K + 2] tokens, then their Logprobs where any are asked for
    # [B + 1] of each sequence its first row of Logprobs; it has k_i + 1, or none
    logprob_rows_np: np.ndarray
    drafts: HostCopy | None  # [B, K], if a sequence tells them


class Verifier:
    """Keeps of the proposals exactly what the target would have produced."""

    def __init__(self, slots: Slots, edits: LogitEdits, vocab_size: int) -> None:
        self._slots = slots
        self._edits = edits
        self._vocab_size = vocab_size
        self._phase = Phase(self._run, slots.device)
        self._sizes: list[int] = []  # captured, ascending

    def warm_ups(
        self, logits: Tensor, distributions: DraftDistributions | None
    ) -> Iterator[Callable[[], Tensor]]:
        """Verifications of nobody that launch every kernel between them, edited logits' too.

        Shape: logits [2 * (K + 1), V].
        """
        integers = uploaded(self._nobody(2), self._slots.device)
        for num_columns, q in self._cases(distributions):
            edited = [logits.float()] if num_columns == self._slots.max_drafts else []
            for x, kind in product([logits, *edited], SAMPLING_KINDS):
                yield partial(self._run, integers, (2, num_columns, *kind), x, *q)

    def rehearse(self, logits: Tensor, distributions: DraftDistributions | None) -> None:
        """Verify for nobody, with edits and with all the logprobs that requests may ask for.

        Shape: logits [max_num_seqs * (K + 1), V].
        """
        size, num_rows = self._slots.max_num_seqs, len(logits)
        num_columns, q = self._cases(distributions)[0]
        integers = uploaded(self._nobody(size), self._slots.device)
        rows = RequestRows.of_nobody(self._slots.dummy, num_rows)
        self._run(integers, (size, num_columns, True, True), self._edits.rehearse(logits, rows), *q)
        index = torch.arange(num_rows, device=logits.device)
        num_top = min(MAX_LOGPROBS, self._vocab_size)
        gather_logprobs(logits[index], torch.zeros_like(index), num_top, self._vocab_size)

    def capture(self, logits: Tensor, distributions: DraftDistributions | None) -> None:
        """Capture verification of logits at this place, of drafts from these or one-hot drafts.

        Shape: logits [max_num_seqs * (K + 1), V].
        """
        sizes = padded_sizes(self._slots.max_num_seqs)
        for size in sizes:
            for num_columns, q in self._cases(distributions):
                tensors = (logits[: size * (num_columns + 1)], *q)
                for kind in SAMPLING_KINDS:
                    self._phase.capture(self._nobody(size), (size, num_columns, *kind), tensors)
        self._sizes = sizes[::-1]

    def verify(
        self, plan: Plan, logits: Tensor, distributions: DraftDistributions | None
    ) -> Drawn | None:
        """Verify all sampled sequences at once; logits: [sum(k_i + 1), V], rows in plan order.

        The drawn tokens go into the slots, behind each sequence's known ones, and on to the host,
        for `read`.
        """
        sampled = plan.sampled
        if not sampled:
            return None
        num_drafts_np = plan.num_drafts_np
        is_void_np = np.array([s.is_void for s in sampled])
        slots_np = np.where(is_void_np, self._slots.dummy, slots_of(sampled))
        cu_rows_np = np.concatenate(([0], np.cumsum(num_drafts_np + 1)))
        rows = RequestRows(
            slots_np, cu_rows_np[:-1], num_drafts_np + 1, np.zeros_like(num_drafts_np)
        )
        tells_drafts = any(s.request.tells_drafts for s in sampled)
        drafts = self._copy_drafts(slots_np) if tells_drafts else None
        edited_np = self._edits.asked_by(slots_np)
        # Edited rows take it even if nothing is drafted: others would be kernels of their own.
        has_drafts = num_drafts_np.any() or (edited_np.any() and distributions is not None)
        kind = (self._slots.max_drafts if has_drafts else 0, *sampling_kind(sampled))
        tensors = (logits, *(distributions or ())) if has_drafts else (logits,)
        if edited_np.all():
            drawn = self._verify_edited(rows, kind, *tensors)
        else:
            # Among the others, those whose logits are edited stand for nobody.
            slots_np = np.where(edited_np, self._slots.dummy, slots_np)
            size = padded_size(len(sampled), self._sizes)
            packed_np = self._pack(slots_np, num_drafts_np, size)
            drawn = self._phase(packed_np, (size, *kind), *tensors)[: len(sampled)]
            if edited_np.any():
                index = uploaded(edited_np.nonzero()[0], drawn.device)
                drawn[index] = self._verify_edited(rows.take(edited_np), kind, *tensors)
        asking_np = np.array([s.request.params.logprobs is not None for s in sampled])
        logprob_rows_np = np.concatenate(([0], np.cumsum(rows.num_rows_np * asking_np)))
        logprobs = self._gather(plan, logits, drawn, rows, asking_np) if asking_np.any() else ()
        copy = HostCopy(drawn, *logprobs)  # the one copy a step
        return Drawn(copy, logprob_rows_np, drafts)

    def _copy_drafts(self, slots_np: np.ndarray) -> HostCopy:
        """Of all sequences, before verification writes over those that it rejects."""
        slot = uploaded(slots_np, self._slots.device)
        return HostCopy(read_slots(self._slots.state, slot, self._slots.max_drafts).draft_ids)

    def _verify_edited(
        self, rows: RequestRows, kind: Shape, logits: Tensor, *distributions: Tensor
    ) -> Tensor:
        """What `_run` returns, of requests that ask for edits. Uncaptured: no graph takes their
        float32 logits, and the host is done with it while the GPU still scores.
        """
        num_drafts_np = rows.num_rows_np - 1
        size = len(num_drafts_np)
        integers = uploaded(self._pack(rows.slots_np, num_drafts_np, size), self._slots.device)
        edited = self._edits.apply(logits, rows)
        return self._run(integers, (size, *kind), edited, *distributions)

    def read(self, plan: Plan, drawn: Drawn | None) -> Verified:
        """What `verify` drew, once it is on the host; and what the step's prompts scored."""
        read_prompt_logprobs(plan)
        if drawn is None:
            return Verified.nothing()
        host_np, *logprobs = drawn.copy.arrays()
        drawn_np = host_np[:, :-1]  # padded with -1
        lens = (drawn_np >= 0).sum(1).tolist()
        token_ids = [row[:n] for row, n in zip(drawn_np.tolist(), lens, strict=True)]
        drafts_np = drawn.drafts.arrays()[0] if drawn.drafts is not None else None
        return Verified(
            token_ids=token_ids,
            is_bad=host_np[:, -1].astype(bool).tolist(),
            logprobs=[
                None
                if (num_top := s.request.params.logprobs) is None
                else to_entries(*(field[first : first + n] for field in logprobs), num_top=num_top)
                for s, first, n in zip(plan.sampled, drawn.logprob_rows_np[:-1], lens, strict=True)
            ],
            draft_token_ids=[
                drafts_np[i, : s.num_drafts].tolist()
                if drafts_np is not None and s.request.tells_drafts
                else None
                for i, s in enumerate(plan.sampled)
            ],
        )

    def _run(
        self,
        integers: Tensor,
        shape: Shape,
        logits: Tensor,
        draft_logits: Tensor | None = None,
        draft_state: Tensor | None = None,
    ) -> Tensor:
        """Verify, and write what was drawn into the slots.

        Shape: integers [3, B + 1 or more], see `_pack`; logits [T, V]; draft_logits [num_slots, K,
        V'], draft_state [num_slots, K, 4]; returns [B, K + 2], the tokens (padded with -1) and
        whether the logits were bad.
        """
        size, num_columns, filters, samples = shape
        cu_rows, (slot, num_drafts) = integers[0, : size + 1], integers[1:, :size].unbind()
        rows = read_slots(self._slots.state, slot, num_columns)
        verified = verify(
            logits,
            cu_rows,
            rows.draft_ids,
            num_drafts,
            draft_logits if samples else None,
            draft_state if samples else None,
            rows.sampling,
            rows.anchor,
            self._vocab_size,
            filters=bool(filters),
            samples=bool(samples),
            draft_rows=slot,
        )
        return write_verified(self._slots.state, slot, rows.anchor, verified)

    def _cases(
        self, distributions: DraftDistributions | None
    ) -> list[tuple[int, tuple[Tensor, ...]]]:
        """Most drafts a sequence, and what they were drawn from: with drafts, and without."""
        columns = sorted({self._slots.max_drafts, 0}, reverse=True)
        return [(n, tuple(distributions or ()) if n else ()) for n in columns]

    def _nobody(self, size: int) -> np.ndarray:
        nobody = np.zeros(0, dtype=np.int64)
        return self._pack(nobody, nobody, size)

    def _pack(self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int) -> np.ndarray:
        """Arguments: [B] -> [3, size + 1 or more]: first rows of the sequences' logits and, one
        column short, slots and numbers of drafts. Padding is plain decodes of the dummy slot.
        """
        packed = np.zeros((3, aligned(size + 1, itemsize=4)), dtype=np.int32)
        packed[1] = self._slots.dummy
        packed[1, : len(slots_np)] = slots_np
        packed[2, : len(num_drafts_np)] = num_drafts_np
        packed[0, 1:] = np.cumsum(packed[2, :-1] + 1)
        return packed

    def _gather(
        self, plan: Plan, logits: Tensor, drawn: Tensor, rows: RequestRows, asking_np: np.ndarray
    ) -> Logprobs:
        """Raw logprobs of every row of the sequences that ask for them, rejected drafts' rows too:
        how many stand is not known on the host, and the logits last until the next pass.

        Shape: drawn [B, K + 2], asking_np [B].
        """
        asking = rows.take(asking_np)
        row_np = asking.each_np()[0]
        column_np = row_np - np.repeat(asking.first_rows_np, asking.num_rows_np)
        seq_np = np.repeat(asking_np.nonzero()[0], asking.num_rows_np)
        row, seq, column = uploaded(np.stack((row_np, seq_np, column_np)), drawn.device)
        num_top = max(s.request.params.logprobs or 0 for s in plan.sampled)
        num_top = min(num_top, self._vocab_size)
        return gather_logprobs(logits[row], drawn[seq, column], num_top, self._vocab_size)

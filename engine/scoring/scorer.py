"""The target model's part of a step: score every proposal in one forward pass."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..api import ReportProgress
from ..models.paged_model import PagedModel
from ..proposers.base import Proposals
from ..request import Request
from ..scheduling.plan import Plan, slots_of
from ..state.batch import HostBatch
from ..state.host_copy import uploaded
from .prompt_logprobs import score_prompts


class Target:
    """Prefill chunks, plain decodes and verifications of a plan, as one ragged batch."""

    def __init__(self, model: PagedModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._ahead: list[Request] = []  # whose `row_ahead` counts in these logits
        self._ahead_logits = torch.empty(0)

    def capture(
        self, num_speculative_tokens: int, most_rows: int, report: ReportProgress
    ) -> Tensor:
        """Capture plain decodes and verifications of every k, of `most_rows` rows a step at most;
        returns the place of the logits.
        """
        progress = partial(report, "capturing the target's graphs")
        return self._model.capture(num_speculative_tokens + 1, most_rows, True, progress)

    def score(self, plan: Plan, proposals: Proposals) -> Tensor:
        """Logits of the k_i + 1 last rows of each sampled sequence: [sum(k_i + 1), V].

        The plan's sequences get the logprobs of the prompt tokens that it scores, on their way to
        the host.
        """
        starts_np = np.array([s.request.num_computed_tokens for s in plan.scheduled])
        query_lens_np = np.array([s.num_new_tokens for s in plan.scheduled])
        samples_np = np.array([s.samples for s in plan.scheduled])
        num_logits_np = np.array([s.num_prompt_logits for s in plan.scheduled])
        scores_prompts = num_logits_np.any()
        query_lens_np[samples_np] += proposals.num_drafts_np
        num_logits_np[samples_np] += proposals.num_drafts_np + 1
        arrays = (slots_of(plan.scheduled), starts_np, query_lens_np, num_logits_np)
        rows_np = self._take_rows_ahead(plan, query_lens_np)
        if (rows_np >= 0).any():
            logits = self._complete(rows_np, arrays)
        else:
            logits = self._model.forward(HostBatch.build(*arrays)).logits
        if scores_prompts:
            logits = score_prompts(plan, logits, num_logits_np, self._vocab_size)
        return logits

    def score_ahead(self, plan: Plan) -> None:
        """Score what a plain step drew, while the host does not know it yet.

        The next `score` finds it done, for the sequences that go on plainly.
        """
        going_on = [s for s in plan.scheduled if s.has_room_ahead]
        if not plan.scores_ahead or not going_on:
            return
        ones_np = np.ones(len(going_on), dtype=np.int64)
        batch = HostBatch.build(slots_of(going_on), -ones_np, ones_np, ones_np, is_relative=True)
        self._ahead_logits = self._model.forward(batch).logits
        self._ahead = [s.request for s in going_on]
        for row, request in enumerate(self._ahead):
            request.row_ahead = row

    def _complete(self, rows_np: np.ndarray, arrays: tuple[np.ndarray, ...]) -> Tensor:
        """Logits of sequences of which some, at these rows, were scored ahead; -1: were not.

        Arguments: [B] each; arrays, those of `HostBatch.build`.
        """
        is_ahead_np = rows_np >= 0
        if np.array_equal(rows_np, np.arange(len(rows_np))):
            return self._ahead_logits[: len(rows_np)]
        logits = self._ahead_logits[self._index(rows_np[is_ahead_np])]  # a copy: see `forward`
        if is_ahead_np.all():
            return logits
        rest = self._model.forward(
            HostBatch.build(*(array[~is_ahead_np] for array in arrays))
        ).logits
        was_ahead_np = np.repeat(is_ahead_np, arrays[-1])  # by row of logits
        order_np = np.argsort(np.argsort(~was_ahead_np, kind="stable"))
        return torch.cat((logits, rest))[self._index(order_np)]

    def _take_rows_ahead(self, plan: Plan, query_lens_np: np.ndarray) -> np.ndarray:
        """Which of the logits that were scored ahead is each sequence's, or -1. Shape: [B]."""
        rows = [s.request.row_ahead if s.samples else None for s in plan.scheduled]
        for request in self._ahead:
            request.row_ahead = None
        self._ahead = []
        rows_np = np.array([-1 if row is None else row for row in rows], dtype=np.int64)
        return np.where(query_lens_np == 1, rows_np, -1)

    def _index(self, rows_np: np.ndarray) -> Tensor:
        return uploaded(rows_np, self._ahead_logits.device)

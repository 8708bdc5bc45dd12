"""Drafts from what clients predict of their answers, in place of the proposer's."""

from weakref import WeakKeyDictionary

import numpy as np
import torch

from outrider.kernels.verify.sampling import STATE_LOG_Z

from ..request import Request
from ..scheduling.plan import Plan, ScheduledRequest, slots_of
from ..state.host_copy import uploaded
from ..state.slots import Slots
from .base import DraftDistributions
from .ngram import ends_of_longest_suffix

MIN_TOKENS, MAX_TOKENS = 2, 32  # of an answer, by which its place in the prediction is found


class Prediction:
    """A predicted answer, and how far the answer has come in it.

    The last tokens of the prompt stand before it. So its beginning is found as every other place
    is: by the tokens before it.
    """

    def __init__(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        text = prompt[-MAX_TOKENS:] + request.predicted_token_ids
        self._text_np = np.array(text, dtype=np.int32)
        self._at = 0

    def after(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """The tokens that follow the last of these in the prediction.

        Of several places the next one is taken: an answer mostly goes through its prediction from
        the beginning to the end.
        """
        suffix_np = np.array(token_ids[-MAX_TOKENS:], dtype=np.int32)
        ends_np = ends_of_longest_suffix(self._text_np, suffix_np, MIN_TOKENS, MAX_TOKENS)
        if len(ends_np) == 0:
            return []
        self._at = int(ends_np[np.searchsorted(ends_np, self._at, "right") % len(ends_np)])
        following: list[int] = self._text_np[self._at : self._at + num_drafts].tolist()
        return following


class Predictions:
    """Drafts from requests' predictions, one-hot, for the sequences whose last tokens are found
    there. For these the proposer drafts nothing, as if they decoded plainly.
    """

    def __init__(self, slots: Slots, distributions: DraftDistributions | None) -> None:
        """`distributions` are the proposer's."""
        self._slots = slots
        self._distributions = distributions
        self._prediction_of: WeakKeyDictionary[Request, Prediction] = WeakKeyDictionary()

    def look_up(self, plan: Plan) -> list[tuple[ScheduledRequest, list[int]]]:
        """Drafts to `write` once the proposer has drafted for the others."""
        predicted = [(s, found) for s in plan.sampled if (found := self._found(s))]
        for scheduled, _ in predicted:
            scheduled.num_drafts = 0
        return predicted

    def write(self, predicted: list[tuple[ScheduledRequest, list[int]]]) -> None:
        """Enter the drafts in the slots and in the plan."""
        for scheduled, found in predicted:
            scheduled.num_drafts, scheduled.is_predicted = len(found), True
        self._slots.write_drafts([(scheduled.request, found) for scheduled, found in predicted])
        if predicted and self._distributions is not None:
            slots = uploaded(slots_of([s for s, _ in predicted]), self._slots.device)
            log_z = self._distributions.state[..., STATE_LOG_Z]
            log_z.index_fill_(0, slots, torch.nan)  # marks these drafts as one-hot

    def _found(self, scheduled: ScheduledRequest) -> list[int]:
        request = scheduled.request
        if scheduled.num_drafts == 0 or not request.predicted_token_ids:
            return []
        if (prediction := self._prediction_of.get(request)) is None:
            prediction = self._prediction_of[request] = Prediction(request)
        found = prediction.after(request.token_ids, scheduled.num_drafts)
        return request.grammar.fitting(found) if request.grammar is not None else found

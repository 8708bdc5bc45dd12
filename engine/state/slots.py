"""State of the running sequences on the device, one slot each.

A step works on an index map `batch_idx -> slot`. The first `num_tokens[slot]` entries of
`token_ids[slot]` are known tokens; drafts are written directly after them. Draft, target and
verifier read the same array, and after a sequence is seated the host sends no more tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.verify.sampling import Rule, Sampling
from outrider.kernels.verify.step import SlotContents

from ..api import Verification
from ..request import Request
from .host_copy import uploaded
from .ragged import aligned, ragged_arange

RULES: dict[Verification, Rule] = {"token": Rule.TOKEN, "block": Rule.BLOCK, "match": Rule.MATCH}

# Rows of one step that verification reads, unless the drafts of models alone make more. A step of
# so many takes a GPU longer with each row, so more drafts that are looked up would not pay, and
# the logits of 256 sequences with 32 drafts each would take gigabytes from the KV cache.
MAX_VERIFIED_ROWS = 1024


class DraftDistributions(NamedTuple):
    """The distributions that the drafts in each slot were drawn from; undefined from row k_i on.

    Drafts are one-hot where the log_z of their state is NaN.
    """

    # [num_slots, K', V'] raw logits, in the draft's dtype; K' <= K
    logits: Tensor
    # [num_slots, K, 4] row states of the draft sampler
    state: Tensor


class Slots:
    """Slots for `max_num_seqs` sequences; one more, the last, is a dummy for padding."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_drafts: int,
        page_size: int,
        device: torch.device,
        vocab_size: int,
        max_drawn: int | None = None,
        num_groups: int = 1,
        num_kept_states: int = 0,
    ) -> None:
        """Token ids are below `vocab_size`; `max_drawn` is `max_drafts` unless it is given.

        Each of `num_groups` groups of layers has its own block table. Layers that keep a state have
        room for `num_kept_states` more, behind the dummy's.
        """
        num_slots = max_num_seqs + 1
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        # Of a sequence in one step: of any drafts, and of those that are drawn from a model.
        self.max_drafts = max_drafts
        self.max_drawn = max_drafts if max_drawn is None else max_drawn
        self.dummy = max_num_seqs  # the slot that padding reads and writes
        self.kept_states = range(num_slots, num_slots + num_kept_states)
        self.num_states = num_slots + num_kept_states
        # Room after the longest sequence: a step writes up to k + 1 tokens, and the next one may
        # be launched before the host has read them.
        width = max_model_len + 2 * (max_drafts + 1)
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.device = device
        # [num_slots, width]
        self.token_ids = torch.zeros(num_slots, width, dtype=torch.int32, device=device)
        # Fields of a slot of the same size are rows of one tensor, so that newcomers take one copy.
        padded = aligned(num_slots, itemsize=4)
        self._longs = torch.zeros(2, padded, dtype=torch.int64, device=device)
        self._words = torch.zeros(5, padded, dtype=torch.int32, device=device)
        num_tokens, seed = self._longs[:, :num_slots]
        words = self._words[:, :num_slots]
        temperature, top_p, min_p = words[:3].view(torch.float32)
        top_k, rule = words[3:]
        top_p.fill_(1)
        rule.fill_(int(Rule.TOKEN))
        # [num_slots] known tokens; verification advances it, a step before the host knows
        self.num_tokens = num_tokens
        # [num_groups, num_slots, pages of width]
        self.block_tables = torch.zeros(
            num_groups, num_slots, -(-width // page_size), dtype=torch.int32, device=device
        )
        # Each field: [num_slots]
        self.sampling = Sampling(temperature, top_k, top_p, min_p, seed, rule)
        self.state = SlotContents(self.token_ids, self.num_tokens, self.sampling)
        # Is given all changes of the block tables: see `write_pages`.
        self.on_pages: Callable[[np.ndarray], None] | None = None
        # By slot, those that were seated there last and still exist.
        self.requests: WeakValueDictionary[int, Request] = WeakValueDictionary()

    @property
    def max_verified(self) -> int:
        """Rows of logits that the verifications of one step read, at most."""
        num_seqs = self.max_num_seqs
        of_drawn, of_all = num_seqs * (self.max_drawn + 1), num_seqs * (self.max_drafts + 1)
        return max(of_drawn, min(of_all, MAX_VERIFIED_ROWS))

    def fill(self, newcomers: Sequence[Request], running: Iterable[Request]) -> None:
        """Write those that have just got their slots, and all changed pages of `running`."""
        entries, num_slots = [], len(self.token_ids)
        for request in running:
            if changed := request.memory.changed_pages:
                assert request.slot is not None
                slot = request.slot
                entries += [(g * num_slots + slot, column, page) for g, column, page in changed]
                changed.clear()
        if newcomers:
            self._write_requests(newcomers)
        if entries:
            entries_np = np.array(entries, dtype=np.int64).T
            if self.on_pages is not None:
                self.on_pages(entries_np)
            self.write_pages(entries_np)

    def write_pages(self, entries_np: np.ndarray) -> None:
        """Change the block tables. Shape: [3, N], of row (group * slots + slot), column, page."""
        self._scatter(self.block_tables.flatten(0, 1), *entries_np)

    def _write_requests(self, seated: Sequence[Request]) -> None:
        """Copy tokens and sampling parameters of requests to their slots, all in one go."""
        self.requests.update(
            {request.slot: request for request in seated if request.slot is not None}
        )
        params = [request.params for request in seated]
        slots_np = np.array([request.slot for request in seated])
        lens_np = np.array([request.num_tokens for request in seated])
        rules = [RULES[request.verification] for request in seated]
        floats_np = np.array([(p.temperature, p.top_p, p.min_p) for p in params], dtype=np.float32)
        words_np = np.column_stack(
            (floats_np.view(np.int32), np.array([p.top_k for p in params]), np.array(rules))
        )
        longs_np = np.column_stack((lens_np, np.array([_as_int64(p.seed) for p in params])))
        tokens_np = np.concatenate([request.token_ids for request in seated])
        slots = uploaded(slots_np, self.device)
        self._words.index_copy_(1, slots, uploaded(words_np.astype(np.int32), self.device).t())
        self._longs.index_copy_(1, slots, uploaded(longs_np, self.device).t())
        self._scatter(
            self.token_ids, slots_np.repeat(lens_np), ragged_arange(0 * lens_np, lens_np), tokens_np
        )

    def write_drafts(self, drafts: list[tuple[Request, list[int]]]) -> None:
        """Copy drafts from the host into the requests' rows, after the tokens that the device
        knows.
        """
        entries = [
            (request.slot, offset, token_id)
            for request, token_ids in drafts
            for offset, token_id in enumerate(token_ids)
        ]
        if entries:
            slots, offsets, values = uploaded(np.array(entries).T.copy(), self.device)
            self.token_ids[slots, self.num_tokens[slots] + offsets] = values.int()

    def _scatter(
        self, table: Tensor, slots_np: np.ndarray, columns_np: np.ndarray, values_np: np.ndarray
    ) -> None:
        # By one index: indexing by two takes the host four times as long.
        entries_np = np.stack((slots_np * table.shape[1] + columns_np, values_np))
        places, values = uploaded(entries_np, self.device)
        table.view(-1).put_(places, values.int())


def _as_int64(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed

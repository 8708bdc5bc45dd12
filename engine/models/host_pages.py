"""The second tier's memory, and the copies between it and the pages of the layers.

What layers keep of a whole sequence is copied likewise: its slots are the pages of one more group.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory.host_tier import PageCopies
from ..state.host_copy import uploaded
from .groups import LayerGroup
from .network import PagedLayers

_BUFFER_BYTES = 256 * 2**20  # on a GPU, of each of three; a larger page gets as much as it takes


class HostPages(PageCopies):
    """Pages in host memory: of each, the parts of all layers of its group side by side."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_pages: Sequence[int],
        page_size: int,
        device: torch.device,
        states: PagedLayers | None,
        state_bytes: int,
    ) -> None:
        """`num_pages`: of each group; last, if there are `states`, of their slots, each of
        `state_bytes`. Raises RuntimeError if a GPU's memory cannot be pinned.
        """
        self._groups, self._device, self._states = groups, device, states
        self._sizes = [group.spec.bytes_per_token * page_size for group in groups]
        self._sizes += [] if states is None else [state_bytes]
        # Of each group: [num_pages, bytes of a page]
        self._host = [
            torch.empty(count, size, dtype=torch.uint8)
            for count, size in zip(num_pages, self._sizes, strict=True)
        ]
        self._prepare()

    def _prepare(self) -> None:
        """Make ready for copies."""

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._host)

    def save(self, group: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        rows = torch.empty(len(pages), self._sizes[group], dtype=torch.uint8)
        self._gather(group, torch.tensor(pages), rows)
        self._host[group][torch.tensor(host_pages)] = rows

    def load(self, group: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self._scatter(group, torch.tensor(pages), self._host[group][torch.tensor(host_pages)])

    def has_loaded(self) -> bool:
        return True

    def before_steps(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def _gather(self, group: int, pages: Tensor, rows: Tensor) -> None:
        for part, of_part in self._parts(group, rows):
            torch.index_select(part, 0, pages, out=of_part)

    def _scatter(self, group: int, pages: Tensor, rows: Tensor) -> None:
        for part, of_part in self._parts(group, rows):
            part.index_copy_(0, pages, of_part)

    def _parts(self, group: int, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What the layers keep, and the columns of `rows` that hold it.

        Shape: rows [n, bytes of a page] -> [num_pages, m] and [n, m] each, of the widest integers
        """
        begin = 0
        for tensor in self.tensors(group):
            part = tensor.view(len(tensor), -1).view(torch.uint8)
            end = begin + part.shape[1]
            of_part = rows[:, begin:end]
            if begin % 8 == end % 8 == rows.shape[1] % 8 == 0:
                part, of_part = part.view(torch.int64), of_part.view(torch.int64)
            yield part, of_part
            begin = end

    def tensors(self, group: int) -> list[Tensor]:
        """Of which a page of this group has a row each."""
        if group == len(self._groups):
            assert self._states is not None
            return [self._states.slot_memory]
        return [pages for _, layer in self._groups[group].layers for pages in layer.bound_pages]


class PinnedHostPages(HostPages):
    """The same for a GPU: pages go through buffers, on streams of their own.

    Only the gathering of what is saved runs between two steps.
    """

    def _prepare(self) -> None:
        for memory in self._host:
            if memory.numel():
                # torch's own pinned memory comes in powers of two.
                _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
                weakref.finalize(self, _unpin, memory).atexit = False
        buffer_bytes = max(_at_once(size) * size for size in self._sizes)
        # Two to save from, in turn, and one to load into.
        self._buffers = torch.empty(3, buffer_bytes, dtype=torch.uint8, device=self._device)
        self._saving, self._loading = (torch.cuda.Stream(self._device) for _ in range(2))
        self._saved = [torch.cuda.Event(), torch.cuda.Event()]  # of the first two buffers
        self._loaded = torch.cuda.Event()
        self._turn = 0
        # Of the host: (group, page) that a copy may not have reached yet.
        self._on_their_way: set[tuple[int, int]] = set()

    def save(self, group: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        steps = torch.cuda.current_stream(self._device)
        if self._saving.query():  # nothing is on its way
            self._on_their_way.clear()
        self._on_their_way.update((group, page) for page in host_pages)
        for ids, host_ids in self._chunks(group, pages, host_pages):
            rows, saved = self._rows(group, self._turn, len(ids)), self._saved[self._turn]
            steps.wait_event(saved)  # the buffer is empty again
            self._gather(group, uploaded(np.array(ids), self._device), rows)
            self._saving.wait_stream(steps)
            with torch.cuda.stream(self._saving):
                for i, first, count in _runs(host_ids):
                    to = self._host[group][first : first + count]
                    to.copy_(rows[i : i + count], non_blocking=True)
            saved.record(self._saving)
            self._turn = 1 - self._turn

    def load(self, group: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self._loading.wait_stream(torch.cuda.current_stream(self._device))
        # Otherwise copies in both directions run side by side.
        if not self._on_their_way.isdisjoint((group, page) for page in host_pages):
            self._loading.wait_stream(self._saving)
        with torch.cuda.stream(self._loading):
            for ids, host_ids in self._chunks(group, pages, host_pages):
                rows = self._rows(group, 2, len(ids))
                for i, first, count in _runs(host_ids):
                    of_host = self._host[group][first : first + count]
                    rows[i : i + count].copy_(of_host, non_blocking=True)
                self._scatter(group, uploaded(np.array(ids), self._device), rows)
        self._loaded.record(self._loading)

    def has_loaded(self) -> bool:
        return bool(self._loaded.query())

    def wait(self) -> None:
        self._loading.synchronize()  # `load` may have failed, and recorded nothing

    def before_steps(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._loaded)
        self._saving.wait_event(self._loaded)  # the host's pages may be given to others

    def _rows(self, group: int, buffer: int, count: int) -> Tensor:
        """Shape: [count, bytes of a page]."""
        size = self._sizes[group]
        return self._buffers[buffer][: count * size].view(count, size)

    def _chunks(
        self, group: int, pages: Sequence[int], host_pages: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """As many as go through a buffer at once."""
        most = _at_once(self._sizes[group])
        for first in range(0, len(pages), most):
            yield pages[first : first + most], host_pages[first : first + most]


def host_pages_of(device: torch.device) -> type[HostPages]:
    """The class of pages for the copies of this device."""
    return HostPages if device.type == "cpu" else PinnedHostPages


def _at_once(bytes_per_page: int) -> int:
    """How many pages of this size go through a buffer at once."""
    return max(1, _BUFFER_BYTES // max(1, bytes_per_page))


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index of the first, first id, length) of each run of consecutive ids."""
    begin = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            yield begin, ids[begin], end - begin
            begin = end


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _check(code: Any) -> None:
    if int(code) != 0:
        raise RuntimeError(f"error {int(code)} of CUDA")

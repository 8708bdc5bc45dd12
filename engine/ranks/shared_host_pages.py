"""Pages in host memory of a target that ranks share: each rank keeps its own part of them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..memory.host_tier import PageCopies
from ..state.phase import Shape
from ..state.ragged import NONE_NP
from .wire import Op


class OtherRanks(Protocol):
    """Of `Followers`, what is needed here."""

    def send(self, op: Op, shape: Shape = (), integers_np: np.ndarray = NONE_NP) -> None: ...

    def ask(self, op: Op) -> list[np.ndarray]: ...


class SharedHostPages(PageCopies):
    """Rank 0's pages; what it does with them, it has the others do with theirs.

    What has come back is found once all ranks have said that no copy of theirs has failed.
    """

    def __init__(
        self, own: PageCopies, others: OtherRanks, groups: Sequence[int], num_bytes: int
    ) -> None:
        """`groups`: those that the others have, too, in their order; `num_bytes`: of all ranks."""
        self._own, self._others, self._num_bytes = own, others, num_bytes
        self._theirs = {group: i for i, group in enumerate(groups)}

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def save(self, group: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        self._send_copy(Op.SAVE, group, pages, host_pages)
        self._own.save(group, pages, host_pages)

    def load(self, group: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self._send_copy(Op.LOAD, group, host_pages, pages)
        self._own.load(group, host_pages, pages)

    def _send_copy(self, op: Op, group: int, pages: Sequence[int], to: Sequence[int]) -> None:
        if group in self._theirs:
            self._others.send(op, (self._theirs[group],), np.array((pages, to)))

    def before_steps(self) -> None:
        self._own.before_steps()
        self._check_others()

    def has_loaded(self) -> bool:
        """Of this rank; the others' steps, from the next one on, wait for what they load."""
        has_loaded = self._own.has_loaded()
        if has_loaded:
            self._check_others()
        return has_loaded

    def wait(self) -> None:
        self._own.wait()
        self._check_others()

    def _check_others(self) -> None:
        """Let their further steps wait, too. Raises RuntimeError if a copy of theirs has failed."""
        for reason_np in self._others.ask(Op.LOADED):
            if reason_np.size:
                raise RuntimeError(f"on another rank: {bytes(reason_np.tolist()).decode()}")

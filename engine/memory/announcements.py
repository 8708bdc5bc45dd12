"""What routers hear of the prefix cache: the pages that a new prompt could share."""

from collections.abc import Callable
from dataclasses import dataclass

from .sequence import SequenceMemory


@dataclass(frozen=True, slots=True)
class PageStored:
    """From now on a page can be shared by this hash."""

    page_hash: bytes
    parent_hash: bytes | None  # of the page before it; None for the first of a sequence
    token_ids: list[int]  # [page_size]


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """No page can be shared by this hash any more."""

    page_hash: bytes


PageEvent = PageStored | PageRemoved


@dataclass(slots=True)
class _Needed:
    """A page in front of a kept state."""

    parent: bytes | None
    count: int = 0  # of the states right behind it, and of the needed pages there


class Announcements:
    """`events` collects what the prefix cache gained and lost, until its reader clears it.

    A page is announced once it can be found. Where layers keep a state, nobody can go on from pages
    alone: there a page is announced once a state is kept behind it, and withdrawn with the last
    one. Pages of sequences with a `cache_salt` are private and never announced.
    """

    def __init__(
        self, page_size: int, is_found: Callable[[bytes], bool], *, needs_states: bool
    ) -> None:
        self.events: list[PageEvent] = []
        self._page_size, self._is_found = page_size, is_found
        self._announced: set[bytes] = set()
        self._needed: dict[bytes, _Needed] | None = {} if needs_states else None

    def stored(self, memory: SequenceMemory, page: int) -> None:
        """This page of a sequence, counted from its first, can be found now."""
        page_hash, start = memory.page_hashes[page], page * self._page_size
        if memory.cache_salt or page_hash in self._announced:
            return
        if self._needed is not None and page_hash not in self._needed:
            return
        parent_hash = memory.page_hashes[page - 1] if page > 0 else None
        token_ids = memory.token_ids[start : start + self._page_size]
        self._announced.add(page_hash)
        self.events.append(PageStored(page_hash, parent_hash, token_ids))

    def lost(self, page_hash: bytes) -> None:
        """A page has gone; perhaps another one can still be found by its hash."""
        if not self._is_found(page_hash):
            self._withdraw(page_hash)

    def state_kept(self, memory: SequenceMemory, edge: int) -> None:
        """A state is kept behind so many pages of a sequence."""
        if self._needed is None or memory.cache_salt:
            return
        hashes = memory.page_hashes
        first = next((i for i in range(edge, 0, -1) if hashes[i - 1] in self._needed), 0)
        for i in range(first, edge):
            parent = hashes[i - 1] if i > 0 else None
            self._needed[hashes[i]] = _Needed(parent)
            if parent is not None:
                self._needed[parent].count += 1
            if self._is_found(hashes[i]):
                self.stored(memory, i)
        self._needed[hashes[edge - 1]].count += 1

    def state_lost(self, page_hash: bytes) -> None:
        """The state behind this page is kept no longer."""
        behind: bytes | None = page_hash
        while behind is not None and self._needed is not None and behind in self._needed:
            needed = self._needed[behind]
            needed.count -= 1
            if needed.count > 0:
                break
            del self._needed[behind]
            self._withdraw(behind)
            behind = needed.parent

    def _withdraw(self, page_hash: bytes) -> None:
        if page_hash in self._announced:
            self._announced.remove(page_hash)
            self.events.append(PageRemoved(page_hash))

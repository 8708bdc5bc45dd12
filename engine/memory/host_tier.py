"""The cache's second tier: evicted pages in host memory, found by their hashes.

A copy there never changes, and stays when its page returns to the device. So a page that is evicted
again need not be copied again.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

log = logging.getLogger(__name__)


class PageCopies(Protocol):
    """Copies pages of a group of layers between the device and the host.

    Steps launched before a call are done with the pages when they are copied; those launched later
    may overwrite what `save` was given. Calls raise RuntimeError, as torch does, if a copy fails.
    """

    def save(self, group: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages to the host."""

    def load(self, group: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Begin to copy pages back to the device."""

    def before_steps(self) -> None:
        """Let further steps on the device wait until what `load` has begun is done."""

    def has_loaded(self) -> bool:
        """Whether all that `load` has begun is done."""

    def wait(self) -> None:
        """Return once it is."""

    @property
    def num_bytes(self) -> int:
        """Of host memory."""


_PIECE_PAGES = 256  # of a transfer: they are copied while the host lists the next ones


@dataclass(slots=True)
class _Kept:
    host_page: int
    has_draft: bool  # whether the draft's KV in it is right


class Arrival(NamedTuple):
    """A page of the device that was held for a transfer, and what has come back in it."""

    group: int
    page: int
    page_hash: bytes | None  # None: nothing that may be found
    has_draft: bool


class HostTier:
    """Keeps evicted pages until it needs their room, the least recently used first, and brings
    pages back in one transfer at a time.

    If a copy fails, it keeps nothing from then on, and the cache goes on without it.
    """

    def __init__(
        self,
        num_pages: Sequence[int],
        copies: PageCopies,
        on_lost: Callable[[int, bytes], None] = lambda group, page_hash: None,
    ) -> None:
        """`num_pages`: of each group. `on_lost(group, page_hash)`: a page is gone from here."""
        self._copies: PageCopies | None = copies  # None: it has failed
        self.num_pages = num_pages[0]  # of the first group
        self._on_lost = on_lost
        self._kept: list[OrderedDict[bytes, _Kept]] = [OrderedDict() for _ in num_pages]
        self._free = [list(range(count))[::-1] for count in num_pages]  # the last is next
        # The transfer that is on its way, of each group: the device's pages that it fills, and what
        # comes into which of them. Both are empty if there is none.
        self._filled: list[list[int]] = []
        self._coming: list[dict[bytes, int]] = []
        self.num_saved = self.num_loaded = 0  # pages of the first group

    @property
    def is_loading(self) -> bool:
        return bool(self._filled)

    @property
    def num_used(self) -> int:
        """Pages of the first group that are kept."""
        return len(self._kept[0])

    def hashes(self, group: int) -> Container[bytes]:
        """Of the pages that can come back."""
        return self._kept[group]

    def held(self, group: int) -> Sequence[int]:
        """The device's pages that a transfer fills."""
        return self._filled[group] if self._filled else ()

    def keep(self, group: int, evicted: Sequence[tuple[int, bytes, bool]]) -> None:
        """Copy what is not here yet of these pages: page, hash, whether the draft's KV is right."""
        if self._copies is None:
            return
        kept, page_of = self._kept[group], dict[int, int]()  # page_of: host page -> page
        for page, page_hash, has_draft in evicted:
            known = kept.get(page_hash)
            if known is None:
                if (host_page := self._room(group)) is not None:
                    kept[page_hash] = _Kept(host_page, has_draft)
                    page_of[host_page] = page
                continue
            kept.move_to_end(page_hash)
            if has_draft and not (known.has_draft or self._is_coming(group, page_hash)):
                known.has_draft, page_of[known.host_page] = True, page
        if page_of:
            with self._or_fail():
                self._copies.save(group, [*page_of.values()], [*page_of])
                self.num_saved += len(page_of) if group == 0 else 0

    def load(
        self, wanted: Sequence[Sequence[bytes]], take: Callable[[int, int], list[int]]
    ) -> None:
        """Begin to copy these pages of each group into pages of the device.

        `take(group, count)` holds so many there, and saves what they hold: piece by piece, so that
        copies in both directions run side by side.
        """
        self._coming = [dict.fromkeys(hashes, 0) for hashes in wanted]  # stay until they have come
        self._filled = [[] for _ in wanted]
        for kept, hashes in zip(self._kept, wanted, strict=True):
            for page_hash in reversed(hashes):  # the beginning of a prefix goes last
                kept.move_to_end(page_hash)
        for group, hashes in enumerate(wanted):
            for first in range(0, len(hashes), _PIECE_PAGES):
                piece = hashes[first : first + _PIECE_PAGES]
                self._load_piece(group, piece, take(group, len(piece)))

    def _load_piece(self, group: int, hashes: Sequence[bytes], pages: list[int]) -> None:
        coming, kept = self._coming[group], self._kept[group]
        self._filled[group] += pages
        for page_hash, page in zip(hashes, pages, strict=True):
            if page_hash in coming:  # none is if a copy has failed
                coming[page_hash] = page
        moves = sorted((kept[h].host_page, coming[h]) for h in hashes if h in coming)
        if moves and self._copies is not None:
            with self._or_fail():  # sorted: neighbours go in one copy
                self._copies.load(group, [m[0] for m in moves], [m[1] for m in moves])

    def take_arrived(self, *, steps_wait: bool) -> list[Arrival]:
        """The pages of a transfer that has ended, those of the beginning of a prefix last.

        `steps_wait`: it need not have ended, since steps launched from now on wait for it.
        """
        if self._copies is not None:
            with self._or_fail():
                if steps_wait:
                    self._copies.before_steps()
                elif not self._copies.has_loaded():
                    return []
        arrived = []
        for group, (pages, coming) in enumerate(zip(self._filled, self._coming, strict=True)):
            hash_of = {page: page_hash for page_hash, page in coming.items()}
            for page in reversed(pages):
                page_hash = hash_of.get(page)
                has_draft = page_hash is not None and self._kept[group][page_hash].has_draft
                arrived.append(Arrival(group, page, page_hash, has_draft))
            self.num_loaded += len(coming) if group == 0 else 0
        self._filled, self._coming = [], []
        return arrived

    def forget(self, page_hash: bytes) -> None:
        """Let nobody find a page of any group here any more, also if it is on its way."""
        for group in range(len(self._kept)):
            self._forget(group, page_hash)

    def _forget(self, group: int, page_hash: bytes) -> None:
        if self._coming:
            self._coming[group].pop(page_hash, None)
        if known := self._kept[group].pop(page_hash, None):
            self._free[group].append(known.host_page)
            self._on_lost(group, page_hash)

    def _is_coming(self, group: int, page_hash: bytes) -> bool:
        return bool(self._coming) and page_hash in self._coming[group]

    def _room(self, group: int) -> int | None:
        """A page to copy to; None: all are on their way to the device."""
        if not self._free[group]:
            # Those that are on their way are the last.
            oldest = next(iter(self._kept[group]), None)
            if oldest is None or self._is_coming(group, oldest):
                return None
            self._forget(group, oldest)
        return self._free[group].pop()

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """Keep nothing any more if a copy inside fails."""
        try:
            yield
        except RuntimeError as error:  # the loss of a rank is none: it ends the engine
            log.warning(
                "the cache's pages in host memory are given up, and answers go on without them: "
                "%s: %s",
                type(error).__name__,
                error,
            )
            copies, self._copies, self.num_pages = self._copies, None, 0
            with suppress(Exception):  # what has begun must not reach pages of others
                assert copies is not None
                copies.wait()
            for group, kept in enumerate(self._kept):
                for page_hash in list(kept):
                    self._forget(group, page_hash)

"""Who holds which page: one allocator, one prefix cache, one page table for both models.

A page holds the KV of the same token positions for the target and for the draft. Pages of a
finished sequence stay findable by the hash of their tokens until somebody needs the room (least
recently used first); a page found that way is shared, never copied.
"""

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from ..request import Request

DUMMY_PAGE = 0  # padding reads and writes it; no sequence ever holds it


@dataclass(frozen=True, slots=True)
class PageStored:
    """A page can be found by this hash from now on."""

    page_hash: bytes
    parent_hash: bytes | None  # of the page before it; None: it is the first of its sequence
    token_ids: list[int]  # [page_size]


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """No page can be found by this hash any more."""

    page_hash: bytes


PageEvent = PageStored | PageRemoved


class KVCacheManager:
    """Pages of the paged KV cache, by reference count.

    A page is found by its tokens, those before it and, with `lookahead`, so many behind it: a
    head's KV of a token depends on the token behind it.

    With `keeps_events`, `events` gathers what the prefix cache gained and lost, for its reader to
    clear. Pages under a `cache_salt` are their owner's own: events do not tell of them.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_caching: bool = True,
        *,
        lookahead: int = 0,
        keeps_events: bool = False,
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"the KV cache needs at least 2 pages, got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._lookahead = lookahead
        self._ref_count = [0] * num_pages
        self._hash: list[bytes | None] = [None] * num_pages
        self._draft_is_valid = [False] * num_pages
        self._page_of_hash: dict[bytes, int] = {}
        self._keeps_events = keeps_events
        self._told_hashes: set[bytes] = set()  # stored, by the events so far, and not removed
        self.events: list[PageEvent] = []
        # Unreferenced pages, the next to be reused first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))

    @property
    def num_usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def attach_prefix(self, request: Request) -> int:
        """Share every cached page of the request's leading tokens; returns the tokens found.

        Tokens whose logits are wanted are left to compute: the last one at least.
        """
        if not self.prefix_caching:
            return 0
        self._hash_pages(request, (request.num_tokens - 1) // self.page_size)
        draft_is_valid = True
        for page_hash in request.page_hashes[: request.num_reusable_tokens // self.page_size]:
            page = self._page_of_hash.get(page_hash)
            if page is None:
                break
            self._take(page)
            request.pages.append(page)
            request.num_computed_tokens += self.page_size
            draft_is_valid = draft_is_valid and self._draft_is_valid[page]
            if draft_is_valid:
                request.num_draft_computed_tokens += self.page_size
        return request.num_computed_tokens

    def prefix_is_coming(self, request: Request, prefilling: list[Request]) -> bool:
        """Whether one of these is about to compute a page that the request could share."""
        if not self.prefix_caching:
            return False
        num_pages = request.num_reusable_tokens // self.page_size
        self._hash_pages(request, num_pages)
        for other in prefilling:
            i = other.num_computed_tokens // self.page_size
            # Hashes are chained: equal ones have all the pages before them in common.
            if (
                i < min(num_pages, len(other.page_hashes))
                and request.page_hashes[i] == other.page_hashes[i]
                and request.page_hashes[i] not in self._page_of_hash
            ):
                return True
        return False

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Grow to pages for the first `num_tokens` positions; False, and no change, if too few."""
        num_new = self.pages_for(num_tokens) - len(request.pages)
        if num_new > len(self._free):
            return False
        for _ in range(num_new):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._ref_count[page] = 1
            request.pages.append(page)
        return True

    def record_computed(self, request: Request) -> None:
        """Make the request's full, computed pages findable by others."""
        if not self.prefix_caching:
            return
        num_known = request.num_tokens - self._lookahead
        num_full = min(request.num_computed_tokens, num_known) // self.page_size
        self._hash_pages(request, num_full)
        for i in range(request.num_recorded_pages, num_full):
            page, page_hash = request.pages[i], request.page_hashes[i]
            # A twin that computed the same tokens first keeps the entry; this page stays private.
            if self._hash[page] is None and page_hash not in self._page_of_hash:
                self._hash[page] = page_hash
                self._page_of_hash[page_hash] = page
                if self._keeps_events and not request.is_salted:
                    self._tell_stored(request, i)
        request.num_recorded_pages = max(request.num_recorded_pages, num_full)

        num_full = min(request.num_draft_computed_tokens, num_known) // self.page_size
        for i in range(request.num_recorded_draft_pages, num_full):
            self._draft_is_valid[request.pages[i]] = True
        request.num_recorded_draft_pages = max(request.num_recorded_draft_pages, num_full)

    def release(self, request: Request) -> None:
        """Give all pages of a request back; what it computed stays findable until reused."""
        # Last page first: the head of a prefix is the part that others share, so it goes last.
        for page in reversed(request.pages):
            self._ref_count[page] -= 1
            if self._ref_count[page] == 0:
                self._free[page] = None
                if self._hash[page] is None:
                    self._free.move_to_end(page, last=False)
        request.forget_computed()

    def check_integrity(self, live_requests: list[Request]) -> None:
        """Account for every page; raises RuntimeError naming the first that does not add up."""
        held = [0] * self.num_pages
        for request in live_requests:
            for page in request.pages:
                held[page] += 1
        for page in range(self.num_pages):
            if held[page] != self._ref_count[page]:
                raise RuntimeError(
                    f"page {page} is held by {held[page]} requests, counted {self._ref_count[page]}"
                )
            if page != DUMMY_PAGE and (held[page] == 0) != (page in self._free):
                raise RuntimeError(f"page {page}: held by {held[page]} requests, yet free or lost")
        for page_hash, page in self._page_of_hash.items():
            if self._hash[page] != page_hash:
                raise RuntimeError(f"page {page} is findable by a hash that is not its own")

    def _take(self, page: int) -> None:
        if self._ref_count[page] == 0:
            del self._free[page]
        self._ref_count[page] += 1

    def _forget(self, page: int) -> None:
        page_hash = self._hash[page]
        if page_hash is not None:
            del self._page_of_hash[page_hash]
            self._hash[page] = None
            if page_hash in self._told_hashes:
                self._told_hashes.remove(page_hash)
                self.events.append(PageRemoved(page_hash))
        self._draft_is_valid[page] = False

    def _tell_stored(self, request: Request, i: int) -> None:
        page_hash, start = request.page_hashes[i], i * self.page_size
        parent_hash = request.page_hashes[i - 1] if i > 0 else None
        token_ids = request.token_ids[start : start + self.page_size]
        self._told_hashes.add(page_hash)
        self.events.append(PageStored(page_hash, parent_hash, token_ids))

    def _hash_pages(self, request: Request, num_pages: int) -> None:
        request.extend_page_hashes(num_pages, self._lookahead, self._hash_page)

    def _hash_page(self, parent: bytes, token_ids: list[int]) -> bytes:
        # A cryptographic hash: tenants must not be able to construct two prefixes that collide.
        return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()

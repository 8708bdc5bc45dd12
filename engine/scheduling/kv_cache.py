"""Which sequence holds which pages: one allocator and one prefix cache for both models.

A page holds the KV of the same token positions for the target and for the draft. Full pages can be
found by the hash of their tokens, also after their sequence has finished, until their room is
needed (least recently used first). A page that is found is shared, never copied. That is safe
because nobody writes to it again: only full pages of known tokens are recorded, and a sequence
only ever writes KV after its computed tokens.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ..request import Request

DUMMY_PAGE = 0  # padding rows read and write it; no sequence ever holds it


@dataclass(frozen=True, slots=True)
class PageStored:
    """From now on a page can be found by this hash."""

    page_hash: bytes
    parent_hash: bytes | None  # of the page before it; None for the first of a sequence
    token_ids: list[int]  # [page_size]


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """No page can be found by this hash any more."""

    page_hash: bytes


PageEvent = PageStored | PageRemoved


class KVCacheManager:
    """Pages of the paged KV cache, with reference counts.

    A page's hash covers its own tokens, all tokens before them, and `lookahead` tokens after them:
    a head's KV of a token depends on the next token too.

    With `keeps_events`, `events` collects what the prefix cache gained and lost, until its reader
    clears it. Pages of sequences with a `cache_salt` are private and never appear there.
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
        self._announced_hashes: set[bytes] = set()  # stored by an event, not removed yet
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

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether there are pages for `num_tokens` tokens of a waiting request.

        If not, its cached pages are evicted last, for it will ask again.
        """
        missing = self.pages_for(num_tokens) - len(self._free)
        if missing <= 0:
            return True
        cached = list(self._cached_pages(request))
        free = [page for page in cached if self._ref_count[page] == 0]
        if missing <= len(cached) - len(free):  # those that others hold
            return True
        for page in reversed(free):
            self._free.move_to_end(page)
        return False

    def attach_prefix(self, request: Request) -> int:
        """Share all cached pages of the request's leading tokens; returns how many tokens.

        Tokens whose logits are needed, at least the last one, are left to compute.
        """
        draft_is_valid = True
        for page in self._cached_pages(request):
            self._take(page)
            request.pages.append(page)
            request.num_computed_tokens += self.page_size
            request.num_recorded_pages += 1
            draft_is_valid = draft_is_valid and self._draft_is_valid[page]
            if draft_is_valid:
                request.num_draft_computed_tokens += self.page_size
        return request.num_computed_tokens

    def prefix_is_coming(self, request: Request, prefilling: list[Request]) -> bool:
        """Whether one of `prefilling` is about to compute a page that the request can share."""
        num_pages = request.num_reusable_tokens // self.page_size
        if not self.prefix_caching or num_pages == 0:  # many short prompts need not be compared
            return False
        self._hash_pages(request, num_pages)
        for other in prefilling:
            i = other.num_computed_tokens // self.page_size
            # Hashes are chained: if two are equal, so are all pages before them.
            if (
                i < min(num_pages, len(other.page_hashes))
                and request.page_hashes[i] == other.page_hashes[i]
                and request.page_hashes[i] not in self._page_of_hash
            ):
                return True
        return False

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Get pages for the first `num_tokens` positions; False, and no change, if too few."""
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
        """Let other sequences find the request's full, computed pages."""
        if not self.prefix_caching:
            return
        num_known = request.num_tokens - self._lookahead
        num_full = min(request.num_computed_tokens, num_known) // self.page_size
        self._hash_pages(request, num_full)
        for i in range(request.num_recorded_pages, num_full):
            page, page_hash = request.pages[i], request.page_hashes[i]
            # If another sequence recorded the same tokens first, this page stays private.
            if page_hash not in self._page_of_hash:
                self._hash[page] = page_hash
                self._page_of_hash[page_hash] = page
                if self._keeps_events and not request.cache_salt:
                    self._announce(request, i)
        request.num_recorded_pages = max(request.num_recorded_pages, num_full)

        num_full = min(request.num_draft_computed_tokens, num_known) // self.page_size
        for i in range(request.num_recorded_draft_pages, num_full):
            self._draft_is_valid[request.pages[i]] = True
        request.num_recorded_draft_pages = max(request.num_recorded_draft_pages, num_full)

    def forget(self, request: Request) -> None:
        """Let nobody find pages of the request's tokens any more: their KV may be NaN.

        That holds for pages that it has given back, too.
        """
        for page_hash in request.page_hashes:
            if (page := self._page_of_hash.get(page_hash)) is not None:
                self._forget(page)

    def release(self, request: Request) -> None:
        """Give back all pages of a request; recorded ones can still be found until reused."""
        # Last page first, so that the beginning of a prefix, which others share, is reused last.
        for page in reversed(request.pages):
            self._ref_count[page] -= 1
            if self._ref_count[page] == 0:
                self._free[page] = None
                if self._hash[page] is None:
                    self._free.move_to_end(page, last=False)
        request.forget_computed()

    def check_integrity(self, live_requests: list[Request]) -> None:
        """Account for every page; raises RuntimeError naming the first that is wrong."""
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

    def _cached_pages(self, request: Request) -> Iterator[int]:
        """The cached pages of the request's leading tokens."""
        if not self.prefix_caching:
            return
        self._hash_pages(request, (request.num_tokens - 1) // self.page_size)
        for page_hash in request.page_hashes[: request.num_reusable_tokens // self.page_size]:
            page = self._page_of_hash.get(page_hash)
            if page is None:
                break
            yield page

    def _take(self, page: int) -> None:
        if self._ref_count[page] == 0:
            del self._free[page]
        self._ref_count[page] += 1

    def _forget(self, page: int) -> None:
        page_hash = self._hash[page]
        if page_hash is not None:
            del self._page_of_hash[page_hash]
            self._hash[page] = None
            if page_hash in self._announced_hashes:
                self._announced_hashes.remove(page_hash)
                self.events.append(PageRemoved(page_hash))
        self._draft_is_valid[page] = False

    def _announce(self, request: Request, i: int) -> None:
        page_hash, start = request.page_hashes[i], i * self.page_size
        parent_hash = request.page_hashes[i - 1] if i > 0 else None
        token_ids = request.token_ids[start : start + self.page_size]
        self._announced_hashes.add(page_hash)
        self.events.append(PageStored(page_hash, parent_hash, token_ids))

    def _hash_pages(self, request: Request, num_pages: int) -> None:
        """Hash the first `num_pages` pages. A hash begins with that of the page before."""
        hashes = request.page_hashes
        for i in range(len(hashes), num_pages):
            parent = hashes[-1] if hashes else _salt_hash(request.cache_salt)
            end = (i + 1) * self.page_size + self._lookahead
            tokens = array("q", request.token_ids[i * self.page_size : end]).tobytes()
            # Cryptographic, so that no tenant can construct two prefixes with the same hash.
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())


def _salt_hash(cache_salt: str) -> bytes:
    """Empty without a salt; otherwise as long as a page's hash, but never equal to one."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"cache_salt").digest()

"""What all sequences leave on the device: one allocator and one prefix cache for both models.

A page holds the KV of the same token positions for the target and for the draft. A page that is
found by its tokens is shared, never copied. That is safe because nobody writes to it again: only
full pages of known tokens are recorded, and a sequence only ever writes KV after its computed
tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .pages import Pages
from .sequence import SequenceMemory


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


class DeviceMemory:
    """Gives pages to sequences, and lets them share those of equal prefixes.

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
        has_head: bool = False,
        keeps_events: bool = False,
    ) -> None:
        """`has_head`: the draft cannot catch up, so pages without its KV are not shared."""
        if num_pages < 2:
            raise ValueError(f"the KV cache needs at least 2 pages, got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._lookahead, self._has_head = lookahead, has_head
        self._pages = Pages(num_pages)
        self._pages_with_draft: set[int] = set()  # whose draft KV is right
        self._keeps_events = keeps_events
        self._announced_hashes: set[bytes] = set()  # stored by an event, not removed yet
        self.events: list[PageEvent] = []

    @property
    def num_usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def fits(self, memory: SequenceMemory, num_tokens: int, num_reusable: int) -> bool:
        """Whether there are pages for `num_tokens` tokens of a waiting sequence, which may share
        its first `num_reusable` ones.

        If not, its cached pages are evicted last, for it will ask again.
        """
        missing = self.pages_for(num_tokens) - self._pages.num_free
        if missing <= 0:
            return True
        cached = self._cached_pages(memory, num_reusable)
        free = [page for page in cached if self._pages.is_free(page)]
        if missing <= len(cached) - len(free):  # those that others hold
            return True
        self._pages.reuse_last(reversed(free))
        return False

    def attach_prefix(self, memory: SequenceMemory, num_reusable: int) -> int:
        """Share all cached pages of the first `num_reusable` tokens; returns how many tokens."""
        draft_is_valid = True
        for page in self._cached_pages(memory, num_reusable):
            self._pages.share(page)
            memory.add_page(page)
            memory.num_computed_tokens += self.page_size
            memory.num_recorded_pages += 1
            draft_is_valid = draft_is_valid and page in self._pages_with_draft
            if draft_is_valid:
                memory.num_draft_computed_tokens += self.page_size
        memory.num_shared_tokens = memory.num_computed_tokens
        return memory.num_shared_tokens

    def prefix_is_coming(
        self, memory: SequenceMemory, num_reusable: int, prefilling: Iterable[SequenceMemory]
    ) -> bool:
        """Whether one of `prefilling` is about to compute a page that the sequence can share."""
        num_pages = num_reusable // self.page_size
        if not self.prefix_caching or num_pages == 0:  # many short prompts need not be compared
            return False
        hashes = memory.hash_pages(num_pages, self.page_size, self._lookahead)
        for other in prefilling:
            i = other.num_computed_tokens // self.page_size
            # Hashes are chained: if two are equal, so are all pages before them.
            if (
                i < min(num_pages, len(other.page_hashes))
                and hashes[i] == other.page_hashes[i]
                and self._pages.find(hashes[i]) is None
            ):
                return True
        return False

    def allocate(self, memory: SequenceMemory, num_tokens: int) -> bool:
        """Get pages for the first `num_tokens` positions; False, and no change, if too few."""
        num_new = self.pages_for(num_tokens) - len(memory.pages)
        if num_new > self._pages.num_free:
            return False
        for _ in range(num_new):
            page = self._pages.take_next()
            self._forget(page)
            memory.add_page(page)
        return True

    def launch(self, memory: SequenceMemory, end: int, draft_end: int | None) -> None:
        """A step is launched that computes a sequence up to `end`, and its draft up to `draft_end`.

        Both are relative to the end of the tokens that are known before the step; None: the draft
        computes nothing.
        """
        num_known = len(memory.token_ids)
        memory.num_computed_tokens = num_known + end
        if draft_end is not None:  # drafts may turn out to be wrong
            memory.num_draft_computed_tokens = num_known + min(draft_end, 0)
        # Pages may be shared at once: whoever finds them runs later on the device, and starts over
        # if they turn out to hold NaN.
        self._record(memory)

    def advance(self, memory: SequenceMemory, num_accepted: int, draft_end: int | None) -> None:
        """That step accepted so many drafts, and the sequence's new tokens are known."""
        num_known = memory.num_computed_tokens  # before the step
        # KV is right for all known tokens and the accepted drafts. The rest will be overwritten.
        num_valid = min(num_known + num_accepted, len(memory.token_ids) - 1)
        if draft_end is not None:
            memory.num_draft_computed_tokens = num_known + draft_end
        memory.num_computed_tokens = num_valid
        memory.num_draft_computed_tokens = min(memory.num_draft_computed_tokens, num_valid)
        self._record(memory)

    def _record(self, memory: SequenceMemory) -> None:
        """Let other sequences find the full, computed pages of one."""
        if not self.prefix_caching:
            return
        num_known = len(memory.token_ids) - self._lookahead
        num_drafted = min(memory.num_draft_computed_tokens, num_known)
        num_found = min(memory.num_computed_tokens, num_drafted if self._has_head else num_known)
        num_full = num_found // self.page_size
        hashes = memory.hash_pages(num_full, self.page_size, self._lookahead)
        for i in range(memory.num_recorded_pages, num_full):
            # If another sequence recorded the same tokens first, this page stays private.
            is_first = self._pages.record(memory.pages[i], hashes[i])
            if is_first and self._keeps_events and not memory.cache_salt:
                self._announce(memory, i)
        memory.num_recorded_pages = max(memory.num_recorded_pages, num_full)

        num_full = num_drafted // self.page_size
        self._pages_with_draft.update(memory.pages[memory.num_recorded_draft_pages : num_full])
        memory.num_recorded_draft_pages = max(memory.num_recorded_draft_pages, num_full)

    def forget(self, memory: SequenceMemory) -> None:
        """Let nobody find pages of a sequence's tokens any more: their KV may be NaN.

        That holds for pages that it has given back, too.
        """
        for page_hash in memory.page_hashes:
            if (page := self._pages.find(page_hash)) is not None:
                self._forget(page)

    def release(self, memory: SequenceMemory) -> None:
        """Give back all pages of a sequence; recorded ones can still be found until reused."""
        # Last page first, so that the beginning of a prefix, which others share, is reused last.
        for page in reversed(memory.pages):
            self._pages.give_back(page)
        memory.pages.clear()

    def check_integrity(self, live: Iterable[SequenceMemory]) -> None:
        """Account for every page; raises RuntimeError naming the first that is wrong."""
        self._pages.check_integrity([memory.pages for memory in live])

    def _cached_pages(self, memory: SequenceMemory, num_reusable: int) -> list[int]:
        """The cached pages of a sequence's leading tokens, up to `num_reusable`."""
        pages: list[int] = []
        if not self.prefix_caching:
            return pages
        # All pages of a prompt: others ask whether it is about to compute them.
        num_full = (len(memory.token_ids) - 1) // self.page_size
        hashes = memory.hash_pages(num_full, self.page_size, self._lookahead)
        for page_hash in hashes[: num_reusable // self.page_size]:
            page = self._pages.find(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def _forget(self, page: int) -> None:
        page_hash = self._pages.forget(page)
        if page_hash in self._announced_hashes:
            self._announced_hashes.remove(page_hash)
            self.events.append(PageRemoved(page_hash))
        self._pages_with_draft.discard(page)

    def _announce(self, memory: SequenceMemory, i: int) -> None:
        page_hash, start = memory.page_hashes[i], i * self.page_size
        parent_hash = memory.page_hashes[i - 1] if i > 0 else None
        token_ids = memory.token_ids[start : start + self.page_size]
        self._announced_hashes.add(page_hash)
        self.events.append(PageStored(page_hash, parent_hash, token_ids))

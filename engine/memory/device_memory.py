"""What all sequences leave on the device: one allocator and one prefix cache for both models.

A page holds the KV of the same token positions for all layers of a group. The first group is of the
layers that attend to everything, of target and draft alike. Layers of the same window have a group
of their own, in which a sequence holds only the pages that its next row attends to.

A page that is found by its tokens is shared, never copied. That is safe because nobody writes to it
again: only full pages of known tokens are recorded, and a sequence only ever writes KV after its
computed tokens.
"""

from collections.abc import Iterable, Sequence

from .announcements import Announcements, PageEvent
from .host_tier import HostTier, PageCopies
from .pages import DUMMY_PAGE, Pages
from .sequence import SequenceMemory
from .spec import PagedSpec
from .states import KeptStates


class DeviceMemory:
    """Gives pages to sequences, and lets them share those of equal prefixes.

    A sequence shares the pages of a prefix up to the last edge of a page at which all groups can go
    on, and those layers, too, that keep a state: see `KeptStates`. A page's hash covers its own
    tokens, all tokens before them, and `lookahead` tokens after them: a head's KV of a token
    depends on the next token too.

    With a second tier, pages and states whose room is needed go to host memory. Before a sequence
    that can share them is seated, they come back into free pages and places: see `bring_back`.

    With `keeps_events`, `events` collects what routers hear of the first group's pages, until its
    reader clears it.
    """

    def __init__(
        self,
        specs: Sequence[PagedSpec],
        num_pages: Sequence[int],
        page_size: int,
        prefix_caching: bool = True,
        *,
        has_head: bool = False,
        keeps_events: bool = False,
        host: tuple[Sequence[int], PageCopies] | None = None,
        states: KeptStates | None = None,
    ) -> None:
        """`specs`: of each group, the first without a window. `num_pages`: so many that no group
        with a window has too few before the first has.

        `has_head`: the draft cannot catch up, so pages without its KV are not shared. `host`: the
        pages of each group, and last the states if there are any, that the second tier has, and
        what copies to and from there.
        """
        if min(num_pages) < 2:
            raise ValueError(f"the KV cache needs at least 2 pages, got {min(num_pages)}")
        self.num_pages = num_pages[0]
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._lookahead, self._has_head = max(spec.lookahead for spec in specs), has_head
        self._groups = [
            Pages(num, page_size, spec.window) for spec, num in zip(specs, num_pages, strict=True)
        ]
        self._has_windows = len(self._groups) > 1
        self._pages_with_draft: set[int] = set()  # whose draft KV is right
        self.states = states if prefix_caching else None
        # What prefixes leave, of each kind what can be found by hashes: states come last.
        self._kinds: list[Pages | KeptStates] = [*self._groups]
        self._kinds += [] if self.states is None else [self.states]
        self._announcements = None
        if keeps_events:
            self._announcements = Announcements(
                page_size, self._is_found, needs_states=self.states is not None
            )
        if self.states is not None:
            self.states.announcements = self._announcements
        self.host = HostTier(*host, self._announce_removed) if host else None
        if self.states is not None and (tier := self.host) is not None:
            g = len(self._groups)
            self.states.on_evict = lambda place, page_hash: tier.keep(g, [(place, page_hash, True)])
            self.states.is_in_host = lambda page_hash: page_hash in tier.hashes(g)
        self._awaits: SequenceMemory | None = None  # for which a transfer was begun last

    @property
    def events(self) -> list[PageEvent]:
        return self._announcements.events if self._announcements else []

    @property
    def num_usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def num_free_pages(self) -> int:
        return self._groups[0].num_free

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def fits(self, memory: SequenceMemory, num_tokens: int, num_reusable: int) -> bool:
        """Whether there are pages for `num_tokens` tokens of a waiting sequence, which may share
        its first `num_reusable` ones.

        If not, its cached pages are evicted last, for it will ask again.
        """
        missing = self.pages_for(num_tokens) - self.num_free_pages
        if missing <= 0:
            return True
        found = self._found(memory, num_reusable)
        if missing <= sum(not self._groups[0].is_free(page) for page in found[0]):
            return True  # others hold so many of its pages
        for group, pages in zip(self._groups, found, strict=True):
            held = [page for page in pages if page != DUMMY_PAGE]
            group.reuse_last(page for page in reversed(held) if group.is_free(page))
        return False

    def attach_prefix(self, memory: SequenceMemory, num_reusable: int, slot: int) -> int:
        """Share the cached pages of the first `num_reusable` tokens, and their state, which goes to
        this slot; returns of how many tokens.
        """
        memory.pages, memory.slot = [[] for _ in self._groups], slot
        for g, pages in enumerate(self._found(memory, num_reusable)):
            for column, page in enumerate(pages):
                memory.set_page(g, column, page)
                if page != DUMMY_PAGE:
                    self._groups[g].share(page)
        shared = memory.pages[0]
        without = (i for i, page in enumerate(shared) if page not in self._pages_with_draft)
        memory.num_recorded_pages = len(shared)
        memory.num_shared_tokens = memory.num_computed_tokens = len(shared) * self.page_size
        memory.num_draft_computed_tokens = next(without, len(shared)) * self.page_size
        if self.states is not None:
            self.states.begin(memory, self._last_edge(memory, num_reusable, self._groups)[1])
        return memory.num_shared_tokens

    def prefix_is_coming(
        self, memory: SequenceMemory, num_reusable: int, prefilling: Iterable[SequenceMemory]
    ) -> bool:
        """Whether one of `prefilling` is about to compute a page, or a state, that the sequence can
        share.
        """
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
                and self._groups[0].find(hashes[i]) is None
            ):
                return True
            if self.states is not None and self.states.is_coming(hashes[:num_pages], other):
                return True
        return False

    def is_coming_back(self, memory: SequenceMemory) -> bool:
        """Whether pages for this sequence are on their way from the host."""
        return self.awaits_pages and self._awaits is memory

    def bring_back(
        self, memory: SequenceMemory, num_reusable: int, *, steps_wait: bool = False
    ) -> bool:
        """Begin to bring back what the host has of the first `num_reusable` tokens of a waiting
        sequence that fits; returns whether it should wait for a transfer.

        Whatever is brought back can be found like any cached page once `receive` is called, also if
        nobody asks for it any more. `steps_wait`: at once, and steps wait for the copies.
        """
        if self.host is None or not self.prefix_caching:
            return False
        hashes, edge = self._last_edge(memory, num_reusable, self._kinds, self.host)
        if edge == self._last_edge(memory, num_reusable, self._kinds)[1]:
            return False
        if self.host.is_loading:
            return True
        missing = []
        for group in self._groups:
            wanted = hashes[group.first_needed(edge * self.page_size) : edge]
            free = [p for h in reversed(wanted) if (p := group.find(h)) and group.is_free(p)]
            group.reuse_last(free)
            missing.append([page_hash for page_hash in wanted if group.find(page_hash) is None])
            if len(missing[-1]) > group.num_free - len(free):
                return False
        if self.states is not None:
            if (awaited := self.states.awaited(hashes[edge - 1])) is None:
                return False
            missing.append(awaited)
        self.host.load(missing, self._take)
        self._awaits = memory
        self.receive(steps_wait=steps_wait)
        return self.host.is_loading

    def receive(self, *, steps_wait: bool = False) -> None:
        """Let sequences find what has come back from the host, or what steps will wait for."""
        if self.host is None or not self.host.is_loading:
            return
        for g, page, page_hash, has_draft in self.host.take_arrived(steps_wait=steps_wait):
            kind = self._kinds[g]
            if page_hash is not None and kind.record(page, page_hash) and has_draft and g == 0:
                self._pages_with_draft.add(page)
            kind.give_back(page)

    @property
    def awaits_pages(self) -> bool:
        """Whether pages are on their way from the host."""
        return self.host is not None and self.host.is_loading

    def allocate(self, memory: SequenceMemory, num_tokens: int) -> bool:
        """Get pages for the first `num_tokens` positions; False, and no change, if too few."""
        first = len(memory.pages[0])  # of all groups
        if num_tokens <= first * self.page_size:
            return True
        num_new = self.pages_for(num_tokens) - first
        if any(num_new > group.num_free for group in self._groups):
            return False
        for g in range(len(self._groups)):
            for column, page in enumerate(self._take(g, num_new), first):
                memory.set_page(g, column, page)
        return True

    def _take(self, g: int, num_pages: int) -> list[int]:
        """Hold the next free pages of a group, or places of states, and save what they hold."""
        if g == len(self._groups):
            assert self.states is not None
            places = (self.states.take_next(at_once=True) for _ in range(num_pages))
            return [place for place in places if place is not None]
        group = self._groups[g]
        pages = [group.take_next() for _ in range(num_pages)]
        if self.host is not None:
            found = [(page, page_hash) for page in pages if (page_hash := group.hash_of(page))]
            # Only the first group has layers of drafts that may fall behind.
            self.host.keep(g, [(p, h, g > 0 or p in self._pages_with_draft) for p, h in found])
            if g == 0 and self.states is not None:  # nobody finds one without the page before it
                self.states.evict(page_hash for _, page_hash in found)
        for page in pages:
            self._forget(g, page)
        return pages

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
        if memory.has_unrecorded_pages(self.page_size):
            self._record(memory)
        if self.states is not None:
            self.states.keep(memory, self._groups[0])
        if self._has_windows:
            self._give_back_behind_windows(memory)

    def advance(self, memory: SequenceMemory, num_accepted: int, draft_end: int | None) -> None:
        """That step accepted so many drafts, and the sequence's new tokens are known."""
        num_known = memory.num_computed_tokens  # before the step
        # KV is right for all known tokens and the accepted drafts. The rest will be overwritten.
        num_valid = min(num_known + num_accepted, len(memory.token_ids) - 1)
        if draft_end is not None:
            memory.num_draft_computed_tokens = num_known + draft_end
        memory.num_computed_tokens = num_valid
        memory.num_draft_computed_tokens = min(memory.num_draft_computed_tokens, num_valid)
        if memory.has_unrecorded_pages(self.page_size):
            self._record(memory)
        if self._has_windows:
            self._give_back_behind_windows(memory)

    def _record(self, memory: SequenceMemory) -> None:
        """Let other sequences find the full, computed pages of one."""
        if not self.prefix_caching:
            return
        num_known = len(memory.token_ids) - self._lookahead
        num_drafted = min(memory.num_draft_computed_tokens, num_known)
        num_found = min(memory.num_computed_tokens, num_drafted if self._has_head else num_known)
        num_full = num_found // self.page_size
        if num_full > memory.num_recorded_pages:
            hashes = memory.hash_pages(num_full, self.page_size, self._lookahead)
            for i in range(memory.num_recorded_pages, num_full):
                # If another sequence recorded the same tokens first, this page stays private.
                is_first = [
                    group.record(pages[i], hashes[i])
                    for group, pages in zip(self._groups, memory.pages, strict=True)
                    if pages[i] != DUMMY_PAGE
                ]
                if is_first[0] and self._announcements is not None:
                    self._announcements.stored(memory, i)
            memory.num_recorded_pages = num_full
        num_full, first = num_drafted // self.page_size, memory.num_recorded_draft_pages
        if num_full > first:
            self._pages_with_draft.update(memory.pages[0][first:num_full])
            memory.num_recorded_draft_pages = num_full

    def forget(self, memory: SequenceMemory) -> None:
        """Let nobody find pages of a sequence's tokens any more: their KV may be NaN.

        That holds for pages that it has given back, too.
        """
        for page_hash in memory.page_hashes:
            if self.host is not None:
                self.host.forget(page_hash)
            for g, group in enumerate(self._groups):
                if (page := group.find(page_hash)) is not None:
                    self._forget(g, page)
            if self.states is not None:
                self.states.forget(page_hash)

    def release(self, memory: SequenceMemory) -> None:
        """Give back all pages of a sequence; recorded ones can still be found until reused."""
        for group, pages in zip(self._groups, memory.pages, strict=True):
            # Last page first, so that the beginning of a prefix, which others share, is reused
            # last.
            for page in reversed(pages):
                if page != DUMMY_PAGE:
                    group.give_back(page)
        memory.pages.clear()

    def check_integrity(self, live: Sequence[SequenceMemory]) -> None:
        """Account for every page; raises RuntimeError naming the first that is wrong."""
        for g, group in enumerate(self._groups):
            filled = self.host.held(g) if self.host else ()
            group.check_integrity([*(memory.pages[g] for memory in live), filled])
        if self.states is not None:
            self.states.check_integrity(self.host.held(len(self._groups)) if self.host else ())

    def _give_back_behind_windows(self, memory: SequenceMemory) -> None:
        """Give back the pages that no row attends to from the computed tokens on.

        Steps on their way may still read them. Whoever gets them is launched later.
        """
        for g in range(1, len(self._groups)):
            group, pages = self._groups[g], memory.pages[g]
            end = first = group.first_needed(memory.num_computed_tokens)
            while first > 0 and pages[first - 1] != DUMMY_PAGE:
                first -= 1
            for column in range(first, end):
                group.give_back(pages[column])
                memory.set_page(g, column, DUMMY_PAGE)

    def _found(self, memory: SequenceMemory, num_reusable: int) -> list[list[int]]:
        """The cached pages from which a sequence can go on, for each group: of its leading tokens,
        up to `num_reusable`.
        """
        if not self.prefix_caching:
            return [[] for _ in self._groups]
        hashes, edge = self._last_edge(memory, num_reusable, self._kinds)
        found = []
        for group in self._groups:
            first = group.first_needed(edge * self.page_size)
            pages = [group.find(page_hash) for page_hash in hashes[first:edge]]
            found.append([DUMMY_PAGE] * first + [page for page in pages if page is not None])
        return found

    def _last_edge(
        self,
        memory: SequenceMemory,
        num_reusable: int,
        kinds: Sequence[Pages | KeptStates],
        host: HostTier | None = None,
    ) -> tuple[list[bytes], int]:
        """The hashes of a sequence's full pages, and the last edge at which it can go on, up to
        `num_reusable` tokens: with what is kept of these kinds on the device and, if given, in the
        second tier.
        """
        # All pages of a prompt: others ask whether it is about to compute them.
        num_full = (len(memory.token_ids) - 1) // self.page_size
        hashes = memory.hash_pages(num_full, self.page_size, self._lookahead)
        edge, num_agreed, i = num_reusable // self.page_size, 0, 0
        while num_agreed < len(kinds):
            last = kinds[i].last_edge(hashes, edge, host.hashes(i) if host else ())
            num_agreed = num_agreed + 1 if last == edge else 1
            edge, i = last, (i + 1) % len(kinds)
        return hashes, edge

    def _forget(self, g: int, page: int) -> None:
        page_hash = self._groups[g].forget(page)
        if g == 0:
            self._pages_with_draft.discard(page)
            if self.states is not None and page_hash is not None:
                self.states.forget(page_hash)  # nobody could find the pages in front of it
        if page_hash is not None:
            self._announce_removed(g, page_hash)

    def _is_found(self, page_hash: bytes) -> bool:
        """Whether a page of the first group can be found by this hash, here or in host memory."""
        in_host = self.host is not None and page_hash in self.host.hashes(0)
        return in_host or self._groups[0].find(page_hash) is not None

    def _announce_removed(self, g: int, page_hash: bytes) -> None:
        if g == 0 and self._announcements is not None:
            self._announcements.lost(page_hash)
        elif g == len(self._groups) and self.states is not None:
            self.states.lost_by_host(page_hash)

"""The pages of one group of layers: who holds them, and which can be found by their tokens."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

DUMMY_PAGE = 0  # no sequence holds it; padding rows use it, and columns of pages that are gone


class Pages:
    """Page ids with reference counts.

    A full page can be found by the hash of its tokens, also after its sequence has ended, until its
    room is needed (least recently used first).
    """

    def __init__(self, num_pages: int, page_size: int, window: int | None) -> None:
        """`window`: how many tokens a row attends to; None: all."""
        self._page_size, self.window = page_size, window
        self._ref_count = [0] * num_pages
        self._hash: list[bytes | None] = [None] * num_pages
        self._page_of_hash: dict[bytes, int] = {}
        # Unreferenced pages, the next to be reused first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, page_hash: bytes) -> int | None:
        return self._page_of_hash.get(page_hash)

    def hash_of(self, page: int) -> bytes | None:
        """By which it can be found, if it can."""
        return self._hash[page]

    def is_free(self, page: int) -> bool:
        return self._ref_count[page] == 0

    def first_needed(self, position: int) -> int:
        """The first page of its sequence that a row at this position attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self._page_size

    def last_edge(self, hashes: Sequence[bytes], most: int, elsewhere: Container[bytes]) -> int:
        """The last edge, counted in pages up to `most`, at which a sequence with these hashes can
        go on: all that a row there attends to is found, here or `elsewhere`.
        """
        edge = num_found = 0  # number found in a row before the edge
        for i in range(most):
            if hashes[i] in self._page_of_hash or hashes[i] in elsewhere:
                num_found += 1
            elif self.window is None:
                break
            else:
                num_found = 0
            if num_found > i or num_found > i - self.first_needed((i + 1) * self._page_size):
                edge = i + 1
        return edge

    def take_next(self) -> int:
        """Hold the free page that is next to be reused; it may still be findable."""
        page, _ = self._free.popitem(last=False)
        self._ref_count[page] = 1
        return page

    def share(self, page: int) -> None:
        """Hold a page that was found."""
        if self._ref_count[page] == 0:
            del self._free[page]
        self._ref_count[page] += 1

    def give_back(self, page: int) -> None:
        self._ref_count[page] -= 1
        if self._ref_count[page] == 0:
            self._free[page] = None
            if self._hash[page] is None:
                self._free.move_to_end(page, last=False)

    def reuse_last(self, pages: Iterable[int]) -> None:
        """Reuse these free pages after all others, and the last of these at the very end."""
        for page in pages:
            self._free.move_to_end(page)

    def record(self, page: int, page_hash: bytes) -> bool:
        """Let a page be found by this hash; False if another one is."""
        if page_hash in self._page_of_hash:
            return False
        self._hash[page] = page_hash
        self._page_of_hash[page_hash] = page
        return True

    def forget(self, page: int) -> bytes | None:
        """Let nobody find a page any more; returns the hash that it had, if any."""
        page_hash = self._hash[page]
        if page_hash is not None:
            del self._page_of_hash[page_hash]
            self._hash[page] = None
        return page_hash

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Account for every page of those that each sequence holds; raises RuntimeError naming the
        first that is wrong.
        """
        num_held = [0] * len(self._ref_count)
        for pages in held:
            for page in pages:
                num_held[page] += page != DUMMY_PAGE
        for page, (count, found) in enumerate(zip(self._ref_count, num_held, strict=True)):
            if found != count:
                raise RuntimeError(f"page {page} is held by {found} sequences, counted {count}")
            if page != DUMMY_PAGE and (found == 0) != (page in self._free):
                raise RuntimeError(f"page {page}: held by {found} sequences, yet free or lost")
        for page_hash, page in self._page_of_hash.items():
            if self._hash[page] != page_hash:
                raise RuntimeError(f"page {page} is findable by a hash that is not its own")

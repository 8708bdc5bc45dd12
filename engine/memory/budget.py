"""How the memory for pages is divided among groups of layers."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .spec import PagedSpec

# Layers with a window cache prefixes of a quarter as many tokens as the others: a hit needs only
# the pages in front of its end, and sequences that end leave those last.
_CACHED_SHARE = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Pages of each group, from those of the first, whose layers attend to everything.

    A group with a window gets what all seats and the rows of a step can hold at once, so that it
    never has too few while the first group has enough.
    """

    specs: Sequence[PagedSpec]
    page_size: int
    max_num_seqs: int
    max_drafts: int
    most_rows: int  # of a step
    caches_prefixes: bool
    has_host_tier: bool = False

    def of_groups(self, num_pages: int) -> list[int]:
        """Pages of every group beside `num_pages` of the first; each has a dummy page."""
        cached = num_pages // _CACHED_SHARE if self.caches_prefixes else 0
        return [
            num_pages
            if spec.window is None
            else self._arriving(spec.window) + min(num_pages, 1 + self._held(spec.window) + cached)
            for spec in self.specs
        ]

    def _arriving(self, window: int) -> int:
        """The most pages that a transfer from host memory fills, for a sequence without a seat."""
        return self._pages_for(window) + 1 if self.has_host_tier else 0

    def _held(self, window: int) -> int:
        """The most pages that sequences hold at once."""
        # Rows of drafts are ahead of the tokens that the host knows, twice if a step is in flight.
        # A window begins and ends within a page, and so do the rows of a step.
        of_seat = self._pages_for(window + 2 * self.max_drafts) + 2
        return self.max_num_seqs * of_seat + self._pages_for(self.most_rows)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_bytes(self, num_pages: int) -> int:
        """Bytes of all groups."""
        counts = zip(self.specs, self.of_groups(num_pages), strict=True)
        return self.page_size * sum(count * spec.bytes_per_token for spec, count in counts)

    def saved_bytes(self, num_pages: int) -> int:
        """Bytes that windows save: by which more it would take if all layers had as many pages."""
        bytes_per_token = sum(spec.bytes_per_token for spec in self.specs)
        return num_pages * self.page_size * bytes_per_token - self.num_bytes(num_pages)

    def most_within(self, num_bytes: int) -> int:
        """The most pages of the first group for which all groups fit into `num_bytes`."""
        bytes_per_token = sum(spec.bytes_per_token for spec in self.specs)
        # If no prefixes are cached and every layer has a window, more would cost nothing.
        bound = _CACHED_SHARE * num_bytes // (self.page_size * bytes_per_token)
        return bisect_right(range(1, bound + 1), num_bytes, key=self.num_bytes)

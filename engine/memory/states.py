"""States behind prefixes, kept beside the seats: a layer that cannot go back goes on from one.

A sequence's state lies in its slot, and covers what was computed. Where a chunk of a prompt ends at
an edge that is worth it, the slot is copied to a place of its own, and is found from then on by the
hash of the page in front of that edge. States are evicted apart from pages: one of a long prompt
takes as much as one of a short one. With a second tier they go to host memory, as pages do.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from .announcements import Announcements
from .pages import Pages
from .sequence import SequenceMemory

# Fewer tokens than this part of an interval are computed again rather than kept.
_LEAST_PART = 8


class KeptStates:
    """Which places hold the state behind which prefix; the least recently used goes first."""

    def __init__(self, places: Sequence[int], page_size: int, interval: int) -> None:
        """`places`: slots, one at least, that no sequence is seated in. A long prompt leaves a
        state every `interval` tokens.
        """
        self._page_size = page_size
        self._step = max(1, interval // page_size) * page_size
        self._least = interval // _LEAST_PART
        self._places = list(places)
        self._free = list(places)
        self._place_of_hash: OrderedDict[bytes, int] = OrderedDict()  # the first goes next
        self._copies: list[tuple[int, int]] = []
        self.announcements: Announcements | None = None  # hears which states are kept
        # (place, hash): this state is about to be given up.
        self.on_evict: Callable[[int, bytes], None] = lambda place, page_hash: None
        self.is_in_host: Callable[[bytes], bool] = lambda page_hash: False

    def last_edge(self, hashes: Sequence[bytes], most: int, elsewhere: Container[bytes]) -> int:
        """The last edge, counted in pages up to `most`, behind which a state is kept, here or
        `elsewhere`.
        """
        for i in range(most, 0, -1):
            if hashes[i - 1] in self._place_of_hash or hashes[i - 1] in elsewhere:
                return i
        return 0

    def is_copied(self, place: int) -> bool:
        """Whether the device has yet to copy to it or from it."""
        return any(place in copy for copy in self._copies)

    def awaited(self, page_hash: bytes) -> list[bytes] | None:
        """Of which states a sequence must wait that goes on from this one: of none if it is here,
        where it is evicted last from now on. None: there is no place that it could come to.
        """
        if page_hash in self._place_of_hash:
            self._place_of_hash.move_to_end(page_hash)
            return []
        places = [*self._free, *self._place_of_hash.values()]
        return None if all(map(self.is_copied, places)) else [page_hash]

    def take_next(self, *, at_once: bool) -> int | None:
        """Hold the place that is next to be reused, until `record` or `give_back`; None: there is
        none. `at_once`: it will be written before the device makes the copies that are listed.
        """
        places: list[tuple[int, bytes | None]] = [(place, None) for place in reversed(self._free)]
        places += [(place, page_hash) for page_hash, place in self._place_of_hash.items()]
        for place, page_hash in places:
            if at_once and self.is_copied(place):
                continue
            if page_hash is not None:
                self.evict([page_hash])
            self._free.remove(place)
            return place
        return None

    def record(self, place: int, page_hash: bytes) -> bool:
        """Let the state in a place that is held be found; False if another one is."""
        if page_hash in self._place_of_hash:
            return False
        self._place_of_hash[page_hash] = place
        return True

    def give_back(self, place: int) -> None:
        """Hold a place no longer; it is free unless it was recorded."""
        if place not in self._place_of_hash.values():
            self._free.append(place)

    def begin(self, memory: SequenceMemory, junction: int) -> None:
        """A sequence is seated that shares some pages, and their state if there are any; others
        have more of its leading pages, `junction` in all.

        It will leave a state where the same prompt could go on, where it begins to differ from
        another, and every interval. Of those last ones nobody knows yet whether they are of use.
        """
        slot, first = memory.slot, memory.num_shared_tokens
        assert slot is not None
        if first > 0:
            page_hash = memory.page_hashes[first // self._page_size - 1]
            self._place_of_hash.move_to_end(page_hash)
            self._copies.append((self._place_of_hash[page_hash], slot))
        last = (len(memory.token_ids) - 1) // self._page_size
        ends = (edge * self._page_size for edge in (junction, last))
        of_use = {end for end in ends if end > first and end - first >= self._least}
        begin = first // self._step * self._step + self._step
        others = {*range(begin, last * self._page_size - self._least + 1, self._step)} - of_use
        memory.state_edges = sorted([(e, True) for e in of_use] + [(e, False) for e in others])

    def is_coming(self, hashes: Sequence[bytes], other: SequenceMemory) -> bool:
        """Whether another sequence will leave a state behind one of these pages."""
        places = (edge // self._page_size - 1 for edge, _ in other.state_edges)
        return any(
            i < len(hashes)
            and hashes[i] == other.page_hashes[i]
            and hashes[i] not in self._place_of_hash
            for i in places
        )

    def keep(self, memory: SequenceMemory, pages: Pages) -> None:
        """Keep what a launched step leaves in a sequence's slot, if that is wanted, and if the page
        in front of it can be found.
        """
        edges, computed = memory.state_edges, memory.num_computed_tokens
        while edges and edges[0][0] <= computed:
            edge, is_of_use = edges.pop(0)
            page_hash = memory.page_hashes[edge // self._page_size - 1]
            if edge < computed or pages.find(page_hash) is None or page_hash in self._place_of_hash:
                continue
            if (place := self.take_next(at_once=False)) is None:
                continue
            self._place_of_hash[page_hash] = place
            if self.announcements is not None and not self.is_in_host(page_hash):
                self.announcements.state_kept(memory, edge // self._page_size)
            if not is_of_use:  # so a long prompt pushes out one state, not all others
                self._place_of_hash.move_to_end(page_hash, last=False)
            assert memory.slot is not None
            self._copies.append((memory.slot, place))

    def evict(self, page_hashes: Iterable[bytes]) -> None:
        """Give up the states behind these pages, those that are kept."""
        for page_hash in page_hashes:
            place = self._place_of_hash.get(page_hash)
            if place is not None and not self.is_copied(place):  # else it is not all there yet
                self.on_evict(place, page_hash)
            self.forget(page_hash)

    def lost_by_host(self, page_hash: bytes) -> None:
        """A state is gone from host memory."""
        if self.announcements is not None and page_hash not in self._place_of_hash:
            self.announcements.state_lost(page_hash)

    def forget(self, page_hash: bytes) -> None:
        """Nobody can go on from this state any more, if it is kept."""
        if (place := self._place_of_hash.pop(page_hash, None)) is not None:
            self._free.append(place)
            if self.announcements is not None and not self.is_in_host(page_hash):
                self.announcements.state_lost(page_hash)

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to), in this order: slots that the device must copy before its next pass."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self, held: Sequence[int] = ()) -> None:
        """Account for every place, also those that are held; raises RuntimeError on a leak."""
        if sorted([*self._free, *self._place_of_hash.values(), *held]) != sorted(self._places):
            raise RuntimeError(f"kept states do not add up: {len(self._free)} places are free")

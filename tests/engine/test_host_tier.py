"""Which evicted pages go to host memory and come back, and when others find them."""

from collections.abc import Sequence

import pytest

from outrider.engine.memory import host_tier
from outrider.engine.memory.announcements import PageRemoved, PageStored
from outrider.engine.memory.device_memory import DeviceMemory
from outrider.engine.memory.host_tier import PageCopies
from outrider.engine.memory.sequence import SequenceMemory
from outrider.engine.memory.spec import PagedSpec

PAGE = 4


class Copies(PageCopies):
    """Pages that are what was last written to them."""

    def __init__(self, num_groups: int = 1) -> None:
        self.device: list[dict[int, object]] = [{} for _ in range(num_groups)]
        self.host: list[dict[int, object]] = [{} for _ in range(num_groups)]
        self.num_saved, self.is_late = 0, False
        self.calls: list[tuple[str, int]] = []  # with how many pages
        self._begun: list[tuple[int, Sequence[int], Sequence[int]]] = []

    def save(self, group: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        assert len(set(host_pages)) == len(host_pages)
        self.calls.append(("save", len(pages)))
        for page, host_page in zip(pages, host_pages, strict=True):
            self.host[group][host_page] = self.device[group][page]
        self.num_saved += len(pages)

    def load(self, group: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self.calls.append(("load", len(pages)))
        self._begun.append((group, host_pages, pages))

    def before_steps(self) -> None:
        self.wait()

    def has_loaded(self) -> bool:
        if not self.is_late:
            self.wait()
        return not self._begun

    def wait(self) -> None:
        for group, host_pages, pages in self._begun:
            for page, host_page in zip(pages, host_pages, strict=True):
                self.device[group][page] = self.host[group][host_page]
        self._begun.clear()


def two_tiers(
    num_pages: int, num_host: int, *, has_head: bool = False, keeps_events: bool = False
) -> tuple[DeviceMemory, Copies]:
    copies = Copies()
    memory = DeviceMemory(
        [PagedSpec(1)],
        [num_pages],
        PAGE,
        has_head=has_head,
        keeps_events=keeps_events,
        host=([num_host], copies),
    )
    return memory, copies


def compute(
    memory: DeviceMemory, copies: Copies, token_ids: list[int], salt: str = "", draft: bool = False
) -> int:
    """Run a sequence from its cached prefix to its end; returns the tokens of that prefix."""
    one = SequenceMemory(token_ids, salt)
    most = len(token_ids) - 1
    assert memory.fits(one, len(token_ids), most)
    memory.bring_back(one, most)
    num_cached = memory.attach_prefix(one, most, 0)
    for i, page in enumerate(one.pages[0]):
        assert copies.device[0][page] == (salt, token_ids[: (i + 1) * PAGE])
    assert memory.allocate(one, len(token_ids))
    for i, page in enumerate(one.pages[0]):
        copies.device[0][page] = salt, token_ids[: (i + 1) * PAGE]
    memory.launch(one, 0, 0 if draft else None)
    memory.check_integrity([one])
    memory.release(one)
    memory.check_integrity([])
    return num_cached


FIRST, SECOND = list(range(17)), list(range(50, 67))


def test_an_evicted_prefix_comes_back() -> None:
    memory, copies = two_tiers(6, 20)
    assert compute(memory, copies, FIRST) == 0
    assert compute(memory, copies, SECOND) == 0
    assert memory.host is not None
    assert memory.host.num_saved == 4  # all that was full
    assert compute(memory, copies, FIRST) == 16
    assert compute(memory, copies, SECOND) == 16
    assert copies.num_saved == 8  # what has come back is not copied again


def test_a_prefix_comes_back_only_under_its_salt() -> None:
    memory, copies = two_tiers(6, 20)
    compute(memory, copies, FIRST, "a")
    compute(memory, copies, SECOND)
    assert compute(memory, copies, FIRST) == 0
    assert compute(memory, copies, FIRST, "b") == 0
    assert compute(memory, copies, FIRST, "a") == 16


def test_the_tier_keeps_no_more_than_its_pages_and_the_newest_of_them() -> None:
    memory, copies = two_tiers(6, 6)
    texts = [list(range(n, n + 17)) for n in (0, 100, 200, 300)]
    for text in texts:
        compute(memory, copies, text)
    assert set(copies.host[0]) == set(range(6))
    assert memory.host is not None
    assert memory.host.num_used == 6
    assert compute(memory, copies, texts[2]) == 16
    assert compute(memory, copies, texts[0]) == 0


def test_nobody_finds_a_page_before_it_has_come() -> None:
    memory, copies = two_tiers(12, 20)
    compute(memory, copies, FIRST)
    for n in (100, 200):
        compute(memory, copies, list(range(n, n + 24)))
    copies.is_late = True
    one, other = SequenceMemory(FIRST), SequenceMemory(FIRST)
    assert memory.bring_back(one, 16)
    assert memory.is_coming_back(one)
    assert memory.bring_back(other, 16)  # which waits for the same transfer
    memory.receive()
    assert memory.attach_prefix(SequenceMemory(FIRST), 16, 0) == 0
    memory.check_integrity([])
    assert memory.num_free_pages == memory.num_usable_pages - 4
    copies.is_late = False
    memory.receive()
    assert memory.attach_prefix(one, 16, 0) == 16
    memory.check_integrity([one])


def test_pages_that_steps_wait_for_are_found_before_they_have_come() -> None:
    memory, copies = two_tiers(6, 20)
    compute(memory, copies, FIRST)
    compute(memory, copies, SECOND)
    copies.is_late = True
    one = SequenceMemory(FIRST)
    assert not memory.bring_back(one, 16, steps_wait=True)
    assert not memory.awaits_pages
    assert memory.attach_prefix(one, 16, 0) == 16
    assert [copies.device[0][page] for page in one.pages[0]] == [
        ("", FIRST[: end + PAGE]) for end in range(0, 16, PAGE)
    ]
    memory.check_integrity([one])


def test_pages_come_back_while_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once all others have gone, which takes as long again."""
    monkeypatch.setattr(host_tier, "_PIECE_PAGES", 3)
    memory, copies = two_tiers(6, 20)
    compute(memory, copies, FIRST)
    compute(memory, copies, SECOND)
    copies.calls.clear()
    assert compute(memory, copies, FIRST) == 16
    assert copies.calls == [("save", 2), ("load", 3), ("save", 1), ("load", 1), ("save", 1)]


def test_a_page_on_its_way_stays_until_it_has_come() -> None:
    memory, copies = two_tiers(12, 5)
    for text in (FIRST, list(range(100, 124)), list(range(200, 224))):
        compute(memory, copies, text)
    copies.is_late = True
    assert memory.bring_back(SequenceMemory(FIRST), 16)  # others make room, and would overwrite it
    copies.is_late = False
    memory.receive()
    assert compute(memory, copies, FIRST) == 16


@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_what_may_be_nan_does_not_come_back(is_on_its_way: bool) -> None:
    memory, copies = two_tiers(6, 20)
    compute(memory, copies, FIRST)
    compute(memory, copies, SECOND)
    copies.is_late = is_on_its_way
    one = SequenceMemory(FIRST)
    one.hash_pages(4, PAGE, 0)
    if is_on_its_way:
        assert memory.bring_back(one, 16)
    memory.forget(one)
    copies.is_late = False
    memory.receive()
    assert compute(memory, copies, FIRST) == 0


def test_a_draft_that_had_fallen_behind_is_behind_when_pages_come_back() -> None:
    memory, copies = two_tiers(6, 20)
    for has_draft in (False, True):
        compute(memory, copies, FIRST, draft=has_draft)
        compute(memory, copies, SECOND)
        one = SequenceMemory(FIRST)
        memory.bring_back(one, 16)
        assert memory.attach_prefix(one, 16, 0) == 16
        assert one.num_draft_computed_tokens == (16 if has_draft else 0)
        memory.release(one)


def test_routers_hear_that_a_page_is_gone_once_both_tiers_have_lost_it() -> None:
    memory, copies = two_tiers(6, 8, keeps_events=True)
    compute(memory, copies, FIRST)
    compute(memory, copies, SECOND)
    compute(memory, copies, FIRST)
    assert not [e for e in memory.events if isinstance(e, PageRemoved)]
    for n in (100, 200, 300):
        compute(memory, copies, list(range(n, n + 17)))
    stored = [e.page_hash for e in memory.events if isinstance(e, PageStored)]
    removed = [e.page_hash for e in memory.events if isinstance(e, PageRemoved)]
    assert len(stored) == len(set(stored)) == 20
    assert len(removed) == len(set(removed)) == 20 - 4 - 8

"""Pages: shared by hash, evicted least recently used first, never lost."""

import random

import pytest

from outrider.engine.memory.device_memory import DeviceMemory
from outrider.engine.memory.pages import DUMMY_PAGE
from outrider.engine.memory.sequence import SequenceMemory
from outrider.engine.memory.spec import PagedSpec

PAGE = 4


def device_memory(num_pages: int, *, has_head: bool = False) -> DeviceMemory:
    return DeviceMemory([PagedSpec(1)], [num_pages], PAGE, has_head=has_head)


def sequence(token_ids: list[int], cache_salt: str = "") -> SequenceMemory:
    return SequenceMemory(token_ids, cache_salt)


def attach(memory: DeviceMemory, one: SequenceMemory) -> int:
    """All but the last token may be shared."""
    return memory.attach_prefix(one, len(one.token_ids) - 1, 0)


def allocate(memory: DeviceMemory, one: SequenceMemory, num_tokens: int) -> bool:
    """Without sharing anything, unless it does so already."""
    if not one.pages:
        memory.attach_prefix(one, 0, 0)
    return memory.allocate(one, num_tokens)


def compute(memory: DeviceMemory, one: SequenceMemory, draft: bool = False) -> None:
    assert allocate(memory, one, len(one.token_ids))
    memory.launch(one, 0, 0 if draft else None)


def test_a_prefix_is_shared_without_a_copy() -> None:
    memory = device_memory(10)
    first = sequence(list(range(10)))
    compute(memory, first)
    second = sequence([*range(8), 77, 78])
    assert attach(memory, second) == 8
    assert second.pages[0] == first.pages[0][:2]
    memory.check_integrity([first, second])


def test_forgotten_pages_are_found_no_more_even_if_given_back() -> None:
    for is_given_back in (False, True):
        memory = device_memory(10)
        first = sequence(list(range(10)))
        compute(memory, first)
        if is_given_back:
            memory.release(first)
        memory.forget(first)
        assert attach(memory, sequence(list(range(10)))) == 0
        memory.check_integrity([] if is_given_back else [first])


def test_forgotten_pages_are_found_no_more_through_those_who_share_them() -> None:
    memory = device_memory(10)
    first, sharer = sequence(list(range(10))), sequence(list(range(10)))
    compute(memory, first)
    assert attach(memory, sharer) == 8
    memory.forget(first)
    compute(memory, sharer)
    assert attach(memory, sequence(list(range(10)))) == 0
    memory.check_integrity([first, sharer])


def test_a_page_that_is_filled_in_part_is_allocated() -> None:
    memory = device_memory(10)
    for num_tokens, num_pages in ((1, 1), (4, 1), (5, 2)):
        one = sequence(list(range(num_tokens)))
        assert allocate(memory, one, num_tokens)
        assert len(one.pages[0]) == num_pages


def test_the_last_token_is_always_left_to_compute() -> None:
    memory = device_memory(10)
    compute(memory, sequence(list(range(8))))
    again = sequence(list(range(8)))
    assert attach(memory, again) == 4


def test_the_same_page_behind_another_prefix_is_another_page() -> None:
    memory = device_memory(10)
    compute(memory, sequence([1, 2, 3, 4, 9, 9, 9, 9, 0]))
    other = sequence([5, 6, 7, 8, 9, 9, 9, 9, 0])
    assert attach(memory, other) == 0


def test_pages_are_shared_only_under_the_same_salt() -> None:
    memory = device_memory(20)
    for salt in ("", "a", "b"):
        compute(memory, sequence(list(range(8)), salt))
    pages = []
    for salt in ("", "a", "b"):
        again = sequence(list(range(8)), salt)
        assert attach(memory, again) == 4
        pages += again.pages[0]
    assert len(set(pages)) == 3
    assert attach(memory, sequence(list(range(8)), "c")) == 0


def test_a_prefix_is_coming_while_another_computes_the_next_page_of_it() -> None:
    memory = device_memory(20)
    other = sequence(list(range(13)))
    assert attach(memory, other) == 0
    assert allocate(memory, other, 13)
    same, diverging = sequence(list(range(13))), sequence([*range(5), 77, 78, 79, 80])
    salted = sequence(list(range(13)), "a")
    assert memory.prefix_is_coming(same, 12, [other])
    assert memory.prefix_is_coming(diverging, 8, [other])
    assert not memory.prefix_is_coming(salted, 12, [other])
    memory.launch(other, 5 - 13, None)  # in two chunks
    assert memory.prefix_is_coming(same, 12, [other])
    assert not memory.prefix_is_coming(diverging, 8, [other])
    memory.launch(other, 0, None)
    assert not memory.prefix_is_coming(same, 12, [other])


def test_pages_without_draft_kv_are_found_but_leave_the_draft_to_catch_up() -> None:
    memory = device_memory(10)
    compute(memory, sequence(list(range(8))), draft=False)
    follower = sequence([*range(8), 99])
    attach(memory, follower)
    assert (follower.num_computed_tokens, follower.num_draft_computed_tokens) == (8, 0)
    compute(memory, follower, draft=True)  # its draft writes into the shared pages
    third = sequence([*range(8), 100])
    attach(memory, third)
    assert third.num_draft_computed_tokens == 8


@pytest.mark.parametrize(
    ("num_accepted", "draft_end", "num_draft_computed"),
    [
        (3, 2, 12),  # a draft model never computes its last draft
        (3, 3, 13),  # a head reads all rows of the target
        (1, 2, 11),  # it computed a draft that was rejected
        (0, 2, 10),
        (0, -4, 6),  # it has not caught up
        (2, None, 5),  # it was not asked
    ],
)
def test_a_draft_has_kv_of_the_accepted_drafts_that_it_computed(
    num_accepted: int, draft_end: int | None, num_draft_computed: int
) -> None:
    memory = device_memory(10)
    one = sequence(list(range(10)))
    assert allocate(memory, one, 14)
    memory.launch(one, 0, -5)
    memory.launch(one, 0, draft_end)
    assert one.num_computed_tokens == 10
    one.token_ids.extend([77] * (num_accepted + 1))
    memory.advance(one, num_accepted, draft_end)
    assert one.num_computed_tokens == 10 + num_accepted
    assert one.num_draft_computed_tokens == num_draft_computed


def test_what_follows_a_stop_has_no_kv() -> None:
    memory = device_memory(10)
    one = sequence(list(range(10)))
    assert allocate(memory, one, 14)
    memory.launch(one, 0, 2)
    one.token_ids.append(77)  # of three accepted drafts
    memory.advance(one, 3, 2)
    assert (one.num_computed_tokens, one.num_draft_computed_tokens) == (10, 10)


def test_pages_that_a_head_has_not_read_are_not_shared() -> None:
    memory = device_memory(10, has_head=True)
    one = sequence(list(range(13)))
    assert allocate(memory, one, 13)
    memory.launch(one, 5 - 13, 5 - 13)
    assert one.head_reads_along
    memory.launch(one, 0, None)
    assert not one.head_reads_along
    other = sequence(list(range(13)))
    assert attach(memory, other) == 4
    assert other.num_draft_computed_tokens == other.num_computed_tokens
    assert not other.head_reads_along  # nothing in this seat


def test_a_page_that_changes_hands_loses_the_drafts_mark() -> None:
    memory = device_memory(3)
    for token_id, draft in ((1, True), (2, False)):
        owner = sequence([token_id] * 8)
        compute(memory, owner, draft)
        memory.release(owner)
    follower = sequence([2] * 9)
    assert attach(memory, follower) == 8
    assert follower.num_draft_computed_tokens == 0


def test_the_least_recently_released_prefix_is_evicted_first() -> None:
    memory = device_memory(5)  # 4 usable
    old, young = sequence([1] * 8), sequence([2] * 8)
    compute(memory, old)
    compute(memory, young)
    memory.release(old)
    memory.release(young)
    newcomer = sequence([3] * 8)
    assert allocate(memory, newcomer, 8)
    assert attach(memory, sequence([1] * 9)) == 0
    assert attach(memory, sequence([2] * 9)) == 8


def test_the_beginning_of_a_prefix_outlives_its_end() -> None:
    memory = device_memory(5)
    old = sequence(list(range(16)))
    compute(memory, old)
    memory.release(old)
    assert allocate(memory, sequence([50] * 8), 8)
    assert attach(memory, sequence(list(range(17)))) == 8


def test_a_prompt_fits_with_the_pages_that_others_hold_and_those_that_are_free() -> None:
    memory = device_memory(7)  # 6 usable
    held, released = sequence([1] * 8), sequence([2] * 8)
    compute(memory, held)
    compute(memory, released)
    memory.release(released)
    assert memory.num_free_pages == 4
    assert memory.fits(sequence([1] * 24), 24, 24 - 1)  # 2 pages are held, 4 free
    assert not memory.fits(sequence([1] * 25), 25, 25 - 1)
    assert memory.fits(sequence([2] * 16), 16, 16 - 1)
    assert not memory.fits(sequence([2] * 17), 17, 17 - 1)  # 2 of the 4 free ones are its own
    memory.check_integrity([held])


def test_the_prefix_of_a_prompt_that_does_not_fit_yet_is_evicted_last() -> None:
    memory = device_memory(8)  # 7 usable
    mine, younger = sequence([1] * 8), sequence([2] * 8)
    for r in (mine, younger):
        compute(memory, r)
        memory.release(r)
    waiting = sequence([1] * 32)
    assert not memory.fits(waiting, 32, 31)
    assert allocate(memory, sequence([3] * 24), 24)
    assert attach(memory, waiting) == 4  # its beginning


def test_allocation_is_all_or_nothing() -> None:
    memory = device_memory(4)
    big = sequence([1] * 20)
    assert not allocate(memory, big, 20)
    assert big.pages[0] == []
    assert memory.num_free_pages == 3


def test_a_leaked_page_is_reported() -> None:
    memory = device_memory(4)
    r = sequence([1] * 4)
    allocate(memory, r, 4)
    with pytest.raises(RuntimeError, match="page 1 is held by 0 sequences, counted 1"):
        memory.check_integrity([])


def windowed(num_pages: int, num_window_pages: int) -> DeviceMemory:
    """Layers that see everything, and layers that see 6 tokens."""
    return DeviceMemory([PagedSpec(1), PagedSpec(1, 6)], [num_pages, num_window_pages], PAGE)


def test_pages_that_no_later_row_sees_are_given_back() -> None:
    memory = windowed(20, 20)
    one = sequence(list(range(17)))
    compute(memory, one)
    # The next row, at 17, sees 12 to 17.
    assert [page == DUMMY_PAGE for page in one.pages[1]] == [True] * 3 + [False] * 2
    assert DUMMY_PAGE not in one.pages[0]
    assert one.changed_pages[-3:] == [(1, column, DUMMY_PAGE) for column in range(3)]
    memory.check_integrity([one])
    assert allocate(memory, one, 26)
    memory.launch(one, 0, None)
    one.token_ids.extend([77] * 5)
    memory.advance(one, 4, None)  # the next row is at 21, and sees 16 to 21
    assert one.pages[1][3] == DUMMY_PAGE != one.pages[1][4]
    memory.release(one)
    memory.check_integrity([])


def test_rejected_drafts_take_no_page_from_the_window() -> None:
    memory = windowed(20, 20)
    one = sequence(list(range(17)))
    compute(memory, one)
    assert allocate(memory, one, 26)
    memory.launch(one, 0, None)
    one.token_ids.append(77)
    memory.advance(one, 0, None)
    assert DUMMY_PAGE not in one.pages[1][3:]


def test_a_hit_ends_where_all_layers_can_go_on() -> None:
    memory = windowed(40, 8)  # 7 usable
    one = sequence(list(range(21)))
    compute(memory, one)
    memory.release(one)
    again, alike = sequence(list(range(22))), sequence([*range(12), *[50] * 8])
    for other, num_shared in ((again, 20), (alike, 12)):
        assert attach(memory, other) == num_shared
        assert other.pages[1][:2] == [DUMMY_PAGE, other.pages[1][1]]
        memory.release(other)
    # Evicts the window's oldest pages, of which two were just used.
    assert allocate(memory, sequence([60] * 20), 20)
    assert attach(memory, sequence(list(range(22)))) == 12


def test_a_window_that_is_gone_lets_nobody_go_on() -> None:
    memory = windowed(40, 4)  # 3 usable
    for start in (0, 100):
        one = sequence(list(range(start, start + 9)))
        compute(memory, one)
        memory.release(one)
    assert attach(memory, sequence(list(range(9)))) == 0
    assert attach(memory, sequence(list(range(100, 109)))) == 8


def test_a_windows_pages_are_forgotten_too() -> None:
    memory = windowed(20, 20)
    spoilt, sound, follower = (sequence(list(range(9))) for _ in range(3))
    compute(memory, spoilt)
    memory.forget(spoilt)
    compute(memory, sound)
    assert attach(memory, follower) == 8
    assert follower.pages[0] == sound.pages[0][:2]
    assert follower.pages[1][1] == sound.pages[1][1]


@pytest.mark.parametrize("has_window", [False, True])
def test_any_history_leaves_every_page_accounted_for(has_window: bool) -> None:
    """With as many pages, layers with a window never have fewer left than the others."""
    rng = random.Random(0)
    for _ in range(50):
        memory = windowed(12, 12) if has_window else device_memory(12)
        live: list[SequenceMemory] = []
        for _ in range(100):
            if live and rng.random() < 0.4:
                memory.release(live.pop(rng.randrange(len(live))))
                continue
            r = sequence([rng.randrange(2) for _ in range(rng.randrange(1, 24))])
            fits = memory.fits(r, len(r.token_ids), len(r.token_ids) - 1)
            attach(memory, r)
            assert allocate(memory, r, len(r.token_ids)) is fits
            if fits:
                compute(memory, r, draft=rng.random() < 0.5)
                live.append(r)
            else:
                memory.release(r)
            memory.check_integrity(live)
        for r in live:
            memory.release(r)
        memory.check_integrity([])
        assert memory.num_free_pages == memory.num_usable_pages

"""Pages: shared by hash, evicted least recently used first, never lost."""

import random

import pytest

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.request import Request
from outrider.engine.scheduling.kv_cache import KVCacheManager

PAGE = 4


def request(token_ids: list[int], cache_salt: str = "") -> Request:
    new = NewRequest(
        request_id="r",
        prompt_token_ids=token_ids,
        params=SamplingParams(max_tokens=1),
        cache_salt=cache_salt,
    )
    return Request(new)


def compute(cache: KVCacheManager, r: Request, draft: bool = False) -> None:
    assert cache.allocate(r, r.num_tokens)
    r.num_computed_tokens = r.num_tokens
    if draft:
        r.num_draft_computed_tokens = r.num_tokens
    cache.record_computed(r)


def test_a_prefix_is_shared_without_a_copy() -> None:
    cache = KVCacheManager(num_pages=10, page_size=PAGE)
    first = request(list(range(10)))
    compute(cache, first)
    second = request([*range(8), 77, 78])
    assert cache.attach_prefix(second) == 8
    assert second.pages == first.pages[:2]
    cache.check_integrity([first, second])


def test_forgotten_pages_are_found_no_more_even_if_given_back() -> None:
    for is_given_back in (False, True):
        cache = KVCacheManager(num_pages=10, page_size=PAGE)
        first = request(list(range(10)))
        compute(cache, first)
        if is_given_back:
            cache.release(first)
        cache.forget(first)
        assert cache.attach_prefix(request(list(range(10)))) == 0
        cache.check_integrity([] if is_given_back else [first])


def test_forgotten_pages_are_found_no_more_through_those_who_share_them() -> None:
    cache = KVCacheManager(num_pages=10, page_size=PAGE)
    first, sharer = request(list(range(10))), request(list(range(10)))
    compute(cache, first)
    assert cache.attach_prefix(sharer) == 8
    cache.forget(first)
    compute(cache, sharer)
    assert cache.attach_prefix(request(list(range(10)))) == 0
    cache.check_integrity([first, sharer])


def test_a_page_that_is_filled_in_part_is_allocated() -> None:
    cache = KVCacheManager(num_pages=10, page_size=PAGE)
    for num_tokens, num_pages in ((1, 1), (4, 1), (5, 2)):
        one = request(list(range(num_tokens)))
        assert cache.allocate(one, num_tokens)
        assert len(one.pages) == num_pages


def test_the_last_token_is_always_left_to_compute() -> None:
    cache = KVCacheManager(num_pages=10, page_size=PAGE)
    compute(cache, request(list(range(8))))
    again = request(list(range(8)))
    assert cache.attach_prefix(again) == 4


def test_the_same_page_behind_another_prefix_is_another_page() -> None:
    cache = KVCacheManager(num_pages=10, page_size=PAGE)
    compute(cache, request([1, 2, 3, 4, 9, 9, 9, 9, 0]))
    other = request([5, 6, 7, 8, 9, 9, 9, 9, 0])
    assert cache.attach_prefix(other) == 0


def test_pages_are_shared_only_under_the_same_salt() -> None:
    cache = KVCacheManager(num_pages=20, page_size=PAGE)
    for salt in ("", "a", "b"):
        compute(cache, request(list(range(8)), salt))
    pages = []
    for salt in ("", "a", "b"):
        again = request(list(range(8)), salt)
        assert cache.attach_prefix(again) == 4
        pages += again.pages
    assert len(set(pages)) == 3
    assert cache.attach_prefix(request(list(range(8)), "c")) == 0


def test_a_prefix_is_coming_while_another_computes_the_next_page_of_it() -> None:
    cache = KVCacheManager(num_pages=20, page_size=PAGE)
    other = request(list(range(13)))
    assert cache.attach_prefix(other) == 0
    assert cache.allocate(other, 13)
    same, diverging = request(list(range(13))), request([*range(5), 77, 78, 79, 80])
    salted = request(list(range(13)), "a")
    assert cache.prefix_is_coming(same, [other])
    assert cache.prefix_is_coming(diverging, [other])
    assert not cache.prefix_is_coming(salted, [other])
    other.num_computed_tokens = 5  # in two chunks
    cache.record_computed(other)
    assert cache.prefix_is_coming(same, [other])
    assert not cache.prefix_is_coming(diverging, [other])
    other.num_computed_tokens = 13
    cache.record_computed(other)
    assert not cache.prefix_is_coming(same, [other])


def test_pages_without_draft_kv_are_found_but_leave_the_draft_to_catch_up() -> None:
    cache = KVCacheManager(num_pages=10, page_size=PAGE)
    compute(cache, request(list(range(8))), draft=False)
    follower = request([*range(8), 99])
    cache.attach_prefix(follower)
    assert (follower.num_computed_tokens, follower.num_draft_computed_tokens) == (8, 0)
    compute(cache, follower, draft=True)  # its draft writes into the shared pages
    third = request([*range(8), 100])
    cache.attach_prefix(third)
    assert third.num_draft_computed_tokens == 8


def test_a_page_that_changes_hands_loses_the_drafts_mark() -> None:
    cache = KVCacheManager(num_pages=3, page_size=PAGE)
    for token_id, draft in ((1, True), (2, False)):
        owner = request([token_id] * 8)
        compute(cache, owner, draft)
        cache.release(owner)
    follower = request([2] * 9)
    assert cache.attach_prefix(follower) == 8
    assert follower.num_draft_computed_tokens == 0


def test_the_least_recently_released_prefix_is_evicted_first() -> None:
    cache = KVCacheManager(num_pages=5, page_size=PAGE)  # 4 usable
    old, young = request([1] * 8), request([2] * 8)
    compute(cache, old)
    compute(cache, young)
    cache.release(old)
    cache.release(young)
    newcomer = request([3] * 8)
    assert cache.allocate(newcomer, 8)
    assert cache.attach_prefix(request([1] * 9)) == 0
    assert cache.attach_prefix(request([2] * 9)) == 8


def test_the_head_of_a_prefix_outlives_its_tail() -> None:
    cache = KVCacheManager(num_pages=5, page_size=PAGE)
    old = request(list(range(16)))
    compute(cache, old)
    cache.release(old)
    assert cache.allocate(request([50] * 8), 8)
    assert cache.attach_prefix(request(list(range(17)))) == 8


def test_a_prompt_fits_with_the_pages_that_others_hold_and_those_that_are_free() -> None:
    cache = KVCacheManager(num_pages=7, page_size=PAGE)  # 6 usable
    held, released = request([1] * 8), request([2] * 8)
    compute(cache, held)
    compute(cache, released)
    cache.release(released)
    assert cache.num_free_pages == 4
    assert cache.fits(request([1] * 24), 24)  # 2 pages are held, 4 free
    assert not cache.fits(request([1] * 25), 25)
    assert cache.fits(request([2] * 16), 16)
    assert not cache.fits(request([2] * 17), 17)  # 2 of the 4 free ones are its own
    cache.check_integrity([held])


def test_the_prefix_of_a_prompt_that_does_not_fit_yet_is_evicted_last() -> None:
    cache = KVCacheManager(num_pages=8, page_size=PAGE)  # 7 usable
    mine, younger = request([1] * 8), request([2] * 8)
    for r in (mine, younger):
        compute(cache, r)
        cache.release(r)
    waiting = request([1] * 32)
    assert not cache.fits(waiting, 32)
    assert cache.allocate(request([3] * 24), 24)
    assert cache.attach_prefix(waiting) == 4  # the head of it


def test_allocation_is_all_or_nothing() -> None:
    cache = KVCacheManager(num_pages=4, page_size=PAGE)
    big = request([1] * 20)
    assert not cache.allocate(big, 20)
    assert big.pages == []
    assert cache.num_free_pages == 3


def test_a_leaked_page_is_reported() -> None:
    cache = KVCacheManager(num_pages=4, page_size=PAGE)
    r = request([1] * 4)
    cache.allocate(r, 4)
    with pytest.raises(RuntimeError, match="page 1 is held by 0 requests, counted 1"):
        cache.check_integrity([])


def test_any_history_leaves_every_page_accounted_for() -> None:
    rng = random.Random(0)
    for _ in range(50):
        cache = KVCacheManager(num_pages=12, page_size=PAGE)
        live: list[Request] = []
        for _ in range(100):
            if live and rng.random() < 0.4:
                cache.release(live.pop(rng.randrange(len(live))))
                continue
            r = request([rng.randrange(2) for _ in range(rng.randrange(1, 24))])
            fits = cache.fits(r, r.num_tokens)
            cache.attach_prefix(r)
            assert cache.allocate(r, r.num_tokens) is fits
            if fits:
                compute(cache, r, draft=rng.random() < 0.5)
                live.append(r)
            else:
                cache.release(r)
            cache.check_integrity(live)
        for r in live:
            cache.release(r)
        cache.check_integrity([])
        assert cache.num_free_pages == cache.num_usable_pages

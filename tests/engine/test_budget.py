"""Memory for pages is divided so that layers with a window take what they need."""

import pytest

from outrider.engine.memory.budget import Budget
from outrider.engine.memory.spec import PagedSpec

FULL, WINDOW = PagedSpec(1000), PagedSpec(3000, window=128)


def budget(*specs: PagedSpec, caches_prefixes: bool = True) -> Budget:
    return Budget(specs, 16, 4, 3, 512, caches_prefixes)


def test_without_windows_all_memory_goes_into_one_group() -> None:
    one = budget(FULL)
    assert one.of_groups(70) == [70]
    assert one.most_within(16_000 * 70 + 15_999) == 70
    assert one.saved_bytes(70) == 0


def test_a_window_takes_what_seats_and_rows_can_hold() -> None:
    # Of 134 tokens a seat, and of 512 rows; one is the dummy page.
    held = 1 + 4 * (9 + 2) + 32
    assert budget(FULL, WINDOW, caches_prefixes=False).of_groups(10_000) == [10_000, held]
    assert budget(FULL, WINDOW).of_groups(10_000) == [10_000, held + 2500]
    assert budget(FULL, WINDOW).of_groups(50) == [50, 50]  # never more than the others


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (PagedSpec(0), WINDOW)])
@pytest.mark.parametrize("num_bytes", [10**5, 10**7, 3 * 10**9])
def test_all_memory_is_used_and_no_more(specs: tuple[PagedSpec, ...], num_bytes: int) -> None:
    one = budget(*specs)
    most = one.most_within(num_bytes)
    assert one.num_bytes(most) <= num_bytes < one.num_bytes(most + 1)


def test_a_window_leaves_room_for_longer_sequences() -> None:
    """At 8,000 tokens, three quarters of the bytes are needed for 128 tokens only."""
    num_bytes = 10**9
    assert budget(FULL, WINDOW).most_within(num_bytes) > 2 * budget(
        FULL, PagedSpec(3000)
    ).most_within(num_bytes)

"""What steps cost, as learned from a few of them."""

from itertools import pairwise

import pytest

from outrider.engine.scheduling.price import MIN_TIMES, Price


def padding(num_seqs: int, num_rows: int) -> tuple[int, int]:
    """As captured: a power of two of sequences, and whole rows of each."""
    size = 1 << (num_seqs - 1).bit_length()
    return size, -(-num_rows // size) * size


def step_s(num_seqs: int, num_rows: int, k: int) -> float:
    """Beyond 128 rows another kernel runs."""
    return 1.0 + 0.001 * num_rows + 0.002 * num_seqs + 0.4 * (num_rows > 128) + 0.1 * k


def learned(sizes: list[int], max_k: int) -> Price:
    price = Price(padding)
    for num_seqs in sizes:
        for k in range(max_k + 1):
            for _ in range(MIN_TIMES):
                num_rows = num_seqs * (k + 1)
                price.observe(num_seqs, num_rows, k, step_s(num_seqs, num_rows, k), 0.1 * k)
    return price


def test_two_steps_of_about_as_many_sequences_cost_what_their_rows_cost() -> None:
    price = learned([1, 2, 4, 8, 16, 32, 64], 3)
    unit = price.of(1, 1) / step_s(1, 1, 0)
    for num_seqs, k in ((40, 2), (44, 2), (64, 1), (64, 2), (33, 3)):
        size, num_rows = padding(num_seqs, num_seqs * (k + 1))
        expected = step_s(size, num_rows, k)
        assert price.of(num_seqs, num_seqs * (k + 1), k) == pytest.approx(unit * expected, rel=0.01)
    assert price.of(44, 132, 2) > 1.2 * price.of(40, 120, 2)


def test_many_prompt_rows_do_not_cost_as_much_as_the_last_step_that_cost_rose_by() -> None:
    """Known up to 160 rows, with an edge behind 128: drafts beside prompts are cheap."""
    price = learned([1, 2, 4, 8, 16, 32], 4)
    unit = price.of(1, 1) / step_s(1, 1, 0)
    with_prompts = price.of(32, 384) - price.of(32, 256)
    assert with_prompts < unit * (step_s(32, 160, 0) - step_s(32, 128, 0)) * 2
    assert with_prompts > unit * (step_s(32, 384, 0) - step_s(32, 256, 0))


def test_rows_that_cost_nothing_are_known_where_they_do() -> None:
    """As products in FP8 take 192 rows for the time of 256."""
    price = Price(padding)
    for k, seconds in enumerate((4.02, 5.14, 6.62, 6.62, 9.72)):
        for _ in range(MIN_TIMES):
            price.observe(64, 64 * (k + 1), 0, seconds, is_usual=False)
    assert price.of(60, 180) == price.of(64, 192) == price.of(64, 250)
    assert price.of(64, 128) < price.of(64, 129) == price.of(64, 256) < price.of(64, 257)


def test_rows_alone_and_drafts_alone_have_prices() -> None:
    """Rows without drafting are those of lookups, drafting without rows is of what was cut."""
    price = learned([1, 2, 4, 8, 16], 3)
    unit = price.of(1, 1) / step_s(1, 1, 0)
    assert price.of_a_draft(8) == pytest.approx(0.1 * unit, rel=0.01)
    assert price.of(8, 32, 0) == pytest.approx(unit * step_s(8, 32, 0), rel=0.01)
    assert price.of(8, 16, 3) == pytest.approx(unit * step_s(8, 16, 3), rel=0.01)
    assert price.of_a_row(8, 8) == pytest.approx(0.001 * unit, rel=0.05)


def test_more_rows_never_cost_less_however_noisy_the_steps_were() -> None:
    price = Price()
    for num_rows, seconds in ((4, 1.0), (8, 1.3), (12, 1.2), (16, 1.5)):
        for _ in range(MIN_TIMES):
            price.observe(4, num_rows, 0, seconds, is_usual=False)
    costs = [price.of(4, num_rows) for num_rows in range(4, 64)]
    assert all(a <= b for a, b in pairwise(costs))
    assert costs[-1] > 1.5


def test_sequences_that_were_never_seen_cost_what_as_many_rows_did() -> None:
    price = Price()
    for num_rows in (1, 2, 4, 8, 16, 32):  # plain steps
        for _ in range(MIN_TIMES):
            price.observe(num_rows, num_rows, 0, 1.0 + 0.05 * num_rows, is_usual=False)
    unit = price.of(1, 1) / 1.05
    assert price.of(4, 16) == pytest.approx(1.8 * unit, rel=0.02)
    assert price.of(12, 24) == pytest.approx(2.2 * unit, rel=0.05)


def test_further_rows_are_cheap_where_the_first_ones_wake_experts() -> None:
    price = Price()
    for num_rows in (1, 2, 3, 4):
        for _ in range(MIN_TIMES):
            price.observe(1, num_rows, 0, 2.0 - 0.5**num_rows, is_usual=False)
    first, last = price.of(1, 2) - price.of(1, 1), price.of(1, 4) - price.of(1, 3)
    assert first > 3 * last > 0


def test_a_price_that_was_measured_while_the_machine_was_busy_is_mended() -> None:
    """Steps of 16 were three times as slow just then. What is usual later says so."""
    price = Price()
    for num_seqs, seconds in ((32, 2.0), (16, 3 * 1.0)):
        for _ in range(MIN_TIMES):
            price.observe(num_seqs, num_seqs, 0, seconds)
    for _ in range(4):
        for num_seqs, seconds in ((32, 2.0), (16, 1.0)):
            for _ in range(12):
                price.observe(num_seqs, num_seqs, 0, seconds)
    assert price.of(16, 16) / price.of(32, 32) == pytest.approx(0.5, rel=0.05)


def test_a_size_between_two_groups_costs_what_lies_between() -> None:
    price = Price()
    for num_seqs in (24, 32):
        for _ in range(MIN_TIMES):
            price.observe(num_seqs, num_seqs, 0, 1.0 * num_seqs, is_usual=False)
    unit = price.of(32, 32) / 32
    for num_seqs in (24, 26, 28, 31):
        assert price.of(num_seqs, num_seqs) == pytest.approx(unit * num_seqs)


def test_a_few_slow_steps_do_not_make_all_further_rows_dear() -> None:
    price = Price()
    for num_rows, times in ((4, [1.0] * 9), (8, [2.0] * 3), (12, [1.2] * 9), (16, [1.3] * 9)):
        for seconds in times:
            price.observe(4, num_rows, 0, seconds, is_usual=False)
    assert price.of(4, 8) == price.of(4, 12) == pytest.approx(1.2 * price.of(4, 4))
    assert price.of(4, 16) == pytest.approx(1.3 * price.of(4, 4))


def test_one_step_that_was_held_up_changes_no_price() -> None:
    price = learned([1, 2, 4], 2)
    before = [price.of(4, num_rows) for num_rows in (4, 8, 12)]
    price.observe(4, 8, 1, 50.0, 0.1, is_usual=False)
    price.observe(4, 4, 0, 50.0)
    assert [price.of(4, num_rows) for num_rows in (4, 8, 12)] == before


@pytest.mark.parametrize("num_before", range(MIN_TIMES + 1))
def test_a_step_that_took_no_longer_than_its_drafting_says_nothing(num_before: int) -> None:
    """A host that was held up reads the step before when this one has ended, or nearly."""
    price, expected = Price(), Price()
    for each in (price, expected):
        for _ in range(num_before):
            each.observe(1, 2, 1, 1.1, 0.1)
    for elapsed_s, drafting_s in ((0.0, 0.0), (0.004, 0.008), (0.008, 0.008)) * MIN_TIMES:
        price.observe(1, 1, 0, elapsed_s, drafting_s)
        price.observe(1, 1, 0, elapsed_s, drafting_s, looks_up=True)
    for _ in range(MIN_TIMES):
        for each in (price, expected):
            each.observe(1, 2, 1, 1.1, 0.1)
    for num_rows in (1, 2, 3):
        assert price.of(1, num_rows) == expected.of(1, num_rows) > 0.0
    assert price.of_lookups == expected.of_lookups


def test_one_draft_that_was_held_up_does_not_look_dear() -> None:
    price = learned([1, 2, 4], 2)
    before = price.of_a_draft(4)
    price.observe(4, 8, 1, 50.0, 49.0)
    assert price.of_a_draft(4) == pytest.approx(before, rel=0.01)

"""Prompt lookup: what it finds, and what it takes to look."""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from outrider.engine.proposers.ngram import NgramLookup


def following(lookup: NgramLookup, token_ids: list[int], num_tokens: int) -> list[int]:
    found = lookup.find(token_ids, num_tokens)
    return found.token_ids if found else []


def found_by_reading(
    token_ids: list[int], num_drafts: int, min_tokens: int, max_tokens: int
) -> list[int]:
    for n in range(max_tokens, min_tokens - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[-n:]:
                text = list(token_ids)
                for _ in range(num_drafts):
                    text.append(text[end + len(text) - len(token_ids)])
                return text[len(token_ids) :]
    return []


@pytest.mark.parametrize(("min_tokens", "max_tokens"), [(1, 4), (2, 3), (3, 3), (1, 1)])
@pytest.mark.parametrize("vocab_size", [1, 2, 5])
def test_drafts_follow_the_latest_occurrence_of_the_longest_suffix(
    min_tokens: int, max_tokens: int, vocab_size: int
) -> None:
    rng = random.Random(vocab_size)
    lookup = NgramLookup(min_tokens, max_tokens)
    token_ids: list[int] = []
    for _ in range(60):
        token_ids += [rng.randrange(vocab_size) for _ in range(rng.randint(1, 3))]
        expected = found_by_reading(token_ids, 4, min_tokens, max_tokens)
        assert following(lookup, token_ids, 4) == expected


def test_a_text_that_repeats_itself_gets_all_the_drafts_it_may_have() -> None:
    lookup = NgramLookup(1, 4)
    assert following(lookup, [9, 6, 6, 6], 5) == [6, 6, 6, 6, 6]
    assert following(lookup, [9, 1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2]


def lines_run(token_ids: list[int]) -> int:
    """Lines of Python that the first lookup in a text runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    lookup = NgramLookup(1, 4)
    sys.settrace(trace)
    try:
        lookup.find(token_ids, 4)
    finally:
        sys.settrace(None)
    return count


def test_a_long_prompt_takes_no_more_python_than_a_short_one() -> None:
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(20_000)]
    assert lines_run(text) <= 2 * lines_run(text[:200])

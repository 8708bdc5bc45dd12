"""Suffix lookup: what it finds, in what it looks, and what it takes to look."""

import random
import sys
from array import array
from collections import Counter
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from engines import GREEDY, engine_config, run, tokens
from tiny_models import Tiny

from outrider.engine.api import NewRequest
from outrider.engine.engine import Engine
from outrider.engine.proposers.suffix import (
    MOST_ALIKE,
    MOST_PLACES,
    MOST_SALTS,
    Corpus,
    RecentAnswers,
    Suffixes,
)
from outrider.engine.request import Request


def following(lookup: Suffixes, token_ids: list[int], num_tokens: int) -> list[int]:
    found = lookup.find(token_ids, num_tokens)
    return found.token_ids if found else []


def suffixes(min_tokens: int = 1) -> Suffixes:
    return Suffixes(min_tokens, "", RecentAnswers(0))


def found_by_reading(
    token_ids: list[int], num_tokens: int, min_tokens: int
) -> tuple[list[int], int, list[float]] | None:
    """What followed, how many tokens agreed, and how many of the places go on so."""

    def alike(end: int) -> int:
        count = 0
        while count < min(end, 32) and token_ids[end - 1 - count] == token_ids[-1 - count]:
            count += 1
        return count

    longest = max((alike(end) for end in range(1, len(token_ids))), default=0)
    if longest < min_tokens:
        return None
    ends = [end for end in range(len(token_ids) - 1, 0, -1) if alike(end) == longest]
    texts = []
    for end in ends:
        text = list(token_ids)
        for _ in range(num_tokens):
            text.append(text[end + len(text) - len(token_ids)])
        texts.append(text[len(token_ids) :])
    first = Counter(text[0] for text in texts).most_common(1)[0][0]
    best = next(text for text in texts if text[0] == first)
    shares = [
        sum(text[: j + 1] == best[: j + 1] for text in texts) / len(texts)
        for j in range(num_tokens)
    ]
    return best, longest, shares


@pytest.mark.parametrize(("vocab_size", "min_tokens"), [(1, 1), (3, 1), (3, 2), (6, 1), (6, 3)])
def test_drafts_follow_the_longest_suffix_as_most_of_its_places_do(
    vocab_size: int, min_tokens: int
) -> None:
    rng = random.Random(vocab_size)
    lookup = suffixes(min_tokens)
    token_ids: list[int] = []
    for _ in range(30):
        token_ids += [rng.randrange(vocab_size) for _ in range(rng.randint(1, 3))]
        if max(Counter(token_ids).values()) > MOST_PLACES:
            break  # not all places are compared
        found = lookup.find(token_ids, 4)
        expected = found_by_reading(token_ids, 4, min_tokens)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            shares = found.shares or [1.0] * 4
            assert (found.token_ids, found.num_matched, shares) == expected


def test_a_text_that_repeats_itself_gets_all_the_drafts_it_may_have() -> None:
    assert following(suffixes(), [9, 6, 6, 6], 5) == [6, 6, 6, 6, 6]
    assert following(suffixes(), [9, 1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2]


def test_a_long_text_is_entered_at_once_as_it_is_bit_by_bit() -> None:
    rng = random.Random(1)
    text = [rng.randrange(40) for _ in range(3000)]
    at_once, bit_by_bit = Corpus(2), Corpus(2)
    at_once.extend(text)
    for token_id in text:
        bit_by_bit.extend([token_id])
        bit_by_bit.find(text[:1], 1)
    for first in range(0, 2990, 7):
        suffix = text[first : first + 2]
        assert at_once.find(suffix, 9) == bit_by_bit.find(suffix, 9)


def test_a_place_is_followed_though_many_later_ones_begin_alike() -> None:
    text = [1, 2, 3, 4, *[5, 2, 3, 6] * 100, 1, 2]
    lookup = suffixes(2)
    assert following(lookup, text, 2) == [3, 4]
    assert following(lookup, [*text, 3], 2) == [4, 5]


def lines_run(token_ids: list[int], *, is_first: bool) -> int:
    """Lines of Python that a lookup in a text runs: the first, or the next with a token more."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    suffixes(2).find(token_ids, 4)  # numpy imports some of its functions when they are first called
    lookup = suffixes(2)
    if not is_first:
        lookup.find(token_ids[:-1], 4)
    sys.settrace(trace)
    try:
        lookup.find(token_ids, 4)
    finally:
        sys.settrace(None)
    return count


def test_the_python_of_a_lookup_is_bounded_however_long_the_text() -> None:
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(20_000)]
    for is_first in (True, False):
        assert lines_run(text, is_first=is_first) < 400
    # Each of the latest places agrees with all tokens that are compared.
    assert lines_run([1, 2] * 10_000, is_first=False) < 3 * MOST_ALIKE * MOST_PLACES


def test_a_text_that_grows_enters_each_place_once() -> None:
    rng = random.Random(0)
    corpus, text, num_entered = Corpus(2), list[int](), 0
    for _ in range(200):
        new = [rng.randrange(200) for _ in range(50)]
        text += new
        corpus.extend(new)
        assert corpus._num_indexed == num_entered
        corpus.index()
        num_entered = corpus.num_tokens - 1
    for place in range(9000, 9900, 50):
        found = corpus.find(text[place - 8 : place], 4)
        assert found == (text[place : place + 4], 8, None, place)


def ended(answer: list[int], salt: str = "") -> Request:
    new = NewRequest(
        request_id="0", prompt_token_ids=[1, 2, 3, 4, 5], params=GREEDY, cache_salt=salt
    )
    request = Request(new)
    request.token_ids += answer
    return request


def add(answers: RecentAnswers, answer: list[int], salt: str = "") -> None:
    answers.add(ended(answer, salt))


def test_recent_answers_are_found_behind_the_same_tokens() -> None:
    answers = RecentAnswers(1 << 20)
    add(answers, [10, 11, 12, 13])
    add(answers, [20, 21, 22, 23, 24])
    assert following(Suffixes(2, "", answers), [9, 2, 3, 4, 5], 8) in (
        [10, 11, 12, 13],
        [20, 21, 22, 23, 24],
    )
    assert following(Suffixes(2, "", answers), [9, 20, 21, 22, 23], 8) == [24]
    assert following(Suffixes(2, "", answers), [9, 21, 22, 23], 8) == []  # too little to go by
    assert following(Suffixes(2, "", answers), [21, 22, 23, 9, 8, 21, 22, 23], 2) == [9, 8]


def test_nobody_finds_the_answers_of_another_cache_salt() -> None:
    answers = RecentAnswers(1 << 20)
    add(answers, [10, 11, 12, 13], salt="a")
    add(answers, [10, 11, 14], salt="c")
    assert following(Suffixes(2, "a", answers), [2, 3, 4, 5], 8) == [10, 11, 12, 13]
    assert following(Suffixes(2, "b", answers), [2, 3, 4, 5], 8) == []
    assert following(Suffixes(2, "c", answers), [2, 3, 4, 5], 8) == [10, 11, 14]
    for i in range(MOST_SALTS):
        answers.add(ended([6], salt=f"{i}"))
    assert following(Suffixes(2, "a", answers), [2, 3, 4, 5], 8) == []


def read_of_answers(
    texts: list[list[int]], suffix: list[int], num_tokens: int
) -> tuple[list[int], int, list[float]] | None:
    """What `found_by_reading` is of one text, of answers: the latest first."""
    places = []
    for text in reversed(texts):
        for end in range(len(text), 0, -1):
            alike = 0
            while alike < min(end, len(suffix)) and text[end - 1 - alike] == suffix[-1 - alike]:
                alike += 1
            places.append((alike, [*text[end : end + num_tokens], None][:num_tokens]))
    longest = max((alike for alike, _ in places), default=0)
    if longest < 4:
        return None
    lines = [line for alike, line in places if alike == longest]
    first = Counter(line[0] for line in lines).most_common(1)[0][0]
    best = [token for token in next(line for line in lines if line[0] == first) if token]
    shares = [
        sum(line[: j + 1] == best[: j + 1] for line in lines) / len(lines) for j in range(len(best))
    ]
    return (best, longest, shares) if best else None


def test_answers_are_found_as_by_reading_all_that_there_is_room_for() -> None:
    """Also where they are written over."""
    rng = random.Random(3)
    num_found = 0
    for num_bytes in (20_000, 60_000, 1 << 20):
        answers = RecentAnswers(num_bytes)
        texts: dict[str, list[list[int]]] = {"a": [], "b": []}
        order: list[tuple[str, list[int]]] = []
        for _ in range(60):
            salt, length = rng.choice("ab"), rng.choice([3, 40, 600])
            answer = [rng.randrange(1, 9 if length < 50 else 400) for _ in range(length)]
            add(answers, answer, salt)
            order.append((salt, [2, 3, 4, 5, *answer]))
            size, kept = 0, []
            for each in reversed(order):
                size += len(each[1]) + 1
                # The space behind a text that is too long for it stays empty.
                if size > num_bytes // 20 - 700:
                    break
                kept.append(each)
            for salt in "ab":
                texts[salt] = [text for s, text in reversed(kept) if s == salt]
                if not texts[salt]:
                    continue
                text = rng.choice(texts[salt])
                end = rng.randrange(4, len(text) + 1)
                suffix = [7, *text[max(0, end - 6) : end]]
                expected = read_of_answers(texts[salt], suffix, 5)
                found = answers.find(salt, suffix, 5)
                num_alike = sum(
                    text[i : i + 4] == suffix[-4:] for _, text in order for i in range(len(text))
                )
                if num_alike > MOST_PLACES or (found and found.num_matched == 7):
                    continue  # not all places are compared, or the 7 agrees as well
                older = [text for s, text in order if s == salt]
                if expected != read_of_answers(older, suffix, 5):
                    continue  # that an older one is still there would be no fault
                assert (found is None) == (expected is None)
                if found is not None and expected is not None:
                    shares = (found.shares or [1.0] * 5)[: len(found.token_ids)]
                    assert (found.token_ids, found.num_matched, shares) == expected
                    num_found += 1
    assert num_found > 100


def test_places_that_were_written_over_are_not_compared() -> None:
    answers, rng = RecentAnswers(20 * 200), random.Random(0)
    for i in range(200):
        add(answers, [*(rng.randrange(100, 10_000) for _ in range(i % 17)), 7, 8, 7, 9, 11])
        places = answers.corpus._places([7, 8, 7, 9])
        assert len(places) == len(set(places))


def test_an_answer_is_entered_as_it_ends_and_nothing_is_made_anew() -> None:
    for num_bytes in (1 << 18, 1 << 24):
        answers = RecentAnswers(num_bytes)
        latest, earlier = answers.corpus._latest, answers.corpus._earlier
        for _ in range(12):
            before = answers.corpus._num_indexed
            add(answers, [*range(5000)])
            after = answers.corpus._num_indexed
            assert 0 < after - (before if after >= before else 0) <= 5000 + 6
            assert answers.find("", [7001, 7002, 7003, 7004], 4) is None
        add(answers, [*range(6000, 6100)])
        assert answers.corpus._latest is latest
        assert answers.corpus._earlier is earlier
        assert following(Suffixes(2, "", answers), [9, 70, 71, 72, 73], 3) == [74, 75, 76]
        assert following(Suffixes(2, "", answers), [9, 6001, 6002, 6003, 6004], 1) == [6005]


def test_prompts_are_not_kept_with_their_answers() -> None:
    answers = RecentAnswers(1 << 18)
    request = ended([*range(100)])
    request.token_ids[:0] = [0] * 5000
    request.num_prompt_tokens += 5000
    answers.add(request)
    assert answers.corpus.num_tokens == 104 + 1  # the prompt's end, and a break


def test_answers_take_no_more_memory_than_they_may() -> None:
    most, rng = 100_000, random.Random(0)
    answers = RecentAnswers(most)
    for i in range(400):
        length = rng.choice([3, 50, 700, 5000])
        add(answers, [rng.randrange(1000) for _ in range(length)], salt=f"{i % 7}")
        arrays = (each for each in vars(answers.corpus).values() if isinstance(each, array))
        assert sum(each.itemsize * len(each) for each in arrays) <= most
    assert answers.corpus._capacity > 4900
    add(answers, [*range(2000, 2200)], salt="x")
    assert following(Suffixes(2, "x", answers), [2, 3, 4, 5], 3) == [2000, 2001, 2002]


def test_a_second_answer_is_drafted_from_the_first_if_that_is_configured(tiny_model: Tiny) -> None:
    num_steps = []
    for num_mib in (0, 1):
        config = engine_config(tiny_model("llama", seed=0), proposer="suffix")
        speculation = replace(config.speculation, suffix_answers_mib=num_mib)
        engine = Engine(replace(config, speculation=speculation))
        first, again = (run(engine, [[5, 9, 3, 7, 11]], GREEDY)[0] for _ in range(2))
        assert tokens(again) == tokens(first)
        num_steps.append(len(again))
    assert num_steps[1] < 6 < num_steps[0]

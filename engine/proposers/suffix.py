"""Drafts what followed the last tokens where they occurred before: in a sequence, in answers.

Places are found as in LZ77. A table has, for every hash of a few tokens, the latest place behind
them, and each place names the one before. So a step looks at a bounded number of places, however
long the text is, and a text takes twelve to forty-eight bytes a token.
"""

from array import array
from collections import Counter
from functools import cached_property
from itertools import accumulate

import numpy as np

from ..request import Request
from .lookup import Found

MOST_ALIKE = 32  # tokens that are compared to see how sure a place is
MOST_PLACES = 16  # that a lookup compares, the latest first
ANSWER_MIN_TOKENS = 4  # that must agree with an answer to another request
_BREAK, _BEFORE = -1, -2  # no token: between texts, and before a text's first token
_FACTOR, _SPREAD, _MASK = 1_000_003, 2_654_435_761, 2**32 - 1
_MANY = 64  # new places that numpy enters faster than a loop
_LEAST_CAPACITY = 512


class Corpus:
    """Tokens, and the places behind each run of `min_tokens` of them.

    A place is the number of tokens before it.
    """

    def __init__(self, min_tokens: int) -> None:
        self.num_tokens = 0
        self._min_tokens = min_tokens
        self._num_indexed = self._capacity = self._shift = 0
        # [MOST_ALIKE + capacity], so that there is something before the first token
        self._tokens_np = np.zeros(0, dtype=np.int32)
        self._grow(_LEAST_CAPACITY)

    def num_bytes_with(self, num_new: int) -> int:
        """What it takes with so many more tokens."""
        capacity = self._capacity_for(num_new)
        return 4 * (MOST_ALIKE + 2 * capacity + (1 << _num_bits(capacity)))

    def extend(self, token_ids: list[int]) -> None:
        num_tokens, capacity = self.num_tokens + len(token_ids), self._capacity_for(len(token_ids))
        if capacity > self._capacity:
            self._grow(capacity)
        first = MOST_ALIKE + self.num_tokens
        self._tokens_np[first : first + len(token_ids)] = token_ids
        self.num_tokens = num_tokens

    def find(self, suffix: list[int], num_following: int, place: int = 0) -> Found | None:
        """How the text went on where it had the longest part of this suffix.

        Of several such places the latest counts of those that go on with the most frequent token.
        `place` is compared as well. Where the text ends it is taken to begin again at its place.
        """
        places = self._places(suffix)
        if 0 < place < self.num_tokens and place not in places:
            places.append(place)
        back, longest, best = suffix[::-1], self._min_tokens, []
        for place in places:
            num_alike = self._num_alike(place, back, longest)
            if num_alike > longest:
                longest, best = num_alike, [place]
            elif num_alike == longest:
                best.append(place)
        if not best:
            return None
        lines = [self._following(place, num_following) for place in best]
        firsts = [line[0] for line in lines]
        leader = firsts.index(Counter(firsts).most_common(1)[0][0]) if len(best) > 1 else 0
        line = lines[leader].tolist()
        if _BREAK in line:
            line = line[: line.index(_BREAK)]
        return Found(line, longest, _shares(lines, leader), best[leader]) if line else None

    def _num_alike(self, place: int, back: list[int], least: int) -> int:
        """How many tokens before a place are those of `back`, in turn; 0 if fewer than `least`."""
        tokens, last = self._tokens, MOST_ALIKE + place - 1
        if len(back) < least or tokens[last - least + 1] != back[least - 1]:
            return 0
        num_alike = 0
        while num_alike < len(back) and tokens[last - num_alike] == back[num_alike]:
            num_alike += 1
        return num_alike if num_alike >= least else 0

    def _following(self, place: int, num_tokens: int) -> "array[int]":
        """The tokens behind a place; where the text ends it begins again there."""
        end = MOST_ALIKE + self.num_tokens
        line = self._tokens[MOST_ALIKE + place : min(MOST_ALIKE + place + num_tokens, end)]
        return (line * -(-num_tokens // len(line)))[:num_tokens]

    def _places(self, suffix: list[int]) -> list[int]:
        """The latest places behind the end of this suffix, or what has the same hash."""
        self._index()
        places: list[int] = []
        if len(suffix) >= self._min_tokens:
            place = self._latest[self._bucket(suffix[-self._min_tokens :])]
            while place and len(places) < MOST_PLACES:
                places.append(place)
                place = self._earlier[place]
        return places

    def _bucket(self, token_ids: "list[int] | array[int]") -> int:
        key = 0
        for token_id in token_ids:
            key = key * _FACTOR + token_id
        return (key * _SPREAD & _MASK) >> self._shift

    def _index(self) -> None:
        """Enter all places but the last: nothing follows it yet."""
        new = range(self._num_indexed + 1, self.num_tokens)
        if len(new) > _MANY:
            self._index_at_once(new)
        else:
            for place in new:
                end = MOST_ALIKE + place
                bucket = self._bucket(self._tokens[end - self._min_tokens : end])
                self._earlier[place] = self._latest[bucket]
                self._latest[bucket] = place
        self._num_indexed = max(self._num_indexed, self.num_tokens - 1)

    def _index_at_once(self, new: range) -> None:
        """The same without Python's time for each."""
        latest_np, earlier_np = (
            np.frombuffer(each, np.int32) for each in (self._latest, self._earlier)
        )
        keys_np = np.zeros(len(new), dtype=np.uint32)
        for first in range(MOST_ALIKE + new.start - self._min_tokens, MOST_ALIKE + new.start):
            token_ids_np = self._tokens_np[first : first + len(new)].astype(np.uint32)
            keys_np = keys_np * np.uint32(_FACTOR) + token_ids_np
        buckets_np = (keys_np * np.uint32(_SPREAD)) >> np.uint32(self._shift)
        order_np = np.argsort(buckets_np, kind="stable")
        buckets_np, places_np = buckets_np[order_np], order_np + new.start
        begins_np = np.append(True, buckets_np[1:] != buckets_np[:-1])  # of places with one hash
        earlier_np[places_np[1:]] = places_np[:-1]
        earlier_np[places_np[begins_np]] = latest_np[buckets_np[begins_np]]
        ends_np = np.roll(begins_np, -1)
        latest_np[buckets_np[ends_np]] = places_np[ends_np]

    def _capacity_for(self, num_new: int) -> int:
        num_tokens = self.num_tokens + num_new
        return self._capacity if num_tokens <= self._capacity else 2 * num_tokens

    def _grow(self, capacity: int) -> None:
        num_bits = _num_bits(capacity)
        tokens = array("i", [_BREAK]) * (MOST_ALIKE + capacity)
        tokens_np = np.frombuffer(tokens, np.int32)
        tokens_np[: len(self._tokens_np)] = self._tokens_np
        self._tokens, self._tokens_np = tokens, tokens_np
        # hash -> place, place -> the one before with this hash; 0: none
        self._latest = array("i", [0]) * (1 << num_bits)
        self._earlier = array("i", [0]) * capacity
        self._capacity, self._shift, self._num_indexed = capacity, 32 - num_bits, 0


def _num_bits(capacity: int) -> int:
    """Of the hashes of so many places: there are two to four for each."""
    return (2 * capacity - 1).bit_length()


def _shares(lines: "list[array[int]]", leader: int) -> list[float] | None:
    """Of each token of one line, how many of all go on so until there; None: all of them."""
    first = lines[leader]
    if all(line == first for line in lines):
        return None
    ends = Counter(_num_equal(line, first) for line in lines)
    num_left = accumulate(range(len(first)), lambda left, j: left - ends[j], initial=len(lines))
    return [left / len(lines) for left in [*num_left][1:]]


def _num_equal(a: "array[int]", b: "array[int]") -> int:
    if a == b:
        return len(a)
    return next(j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)


class Suffixes:
    """What the last tokens of a sequence led to earlier in it, or in recent answers."""

    def __init__(self, min_tokens: int, cache_salt: str, answers: "RecentAnswers") -> None:
        """Of the answers it looks into those of its own cache salt."""
        self._min_tokens, self._answers, self._cache_salt = min_tokens, answers, cache_salt
        self._place = self._num_known = 0  # where the text went on as it does now, and when

    @cached_property
    def _own(self) -> Corpus:
        """Made when it is looked into: for many short answers it never is."""
        return Corpus(self._min_tokens)

    def find(self, token_ids: list[int], num_following: int) -> Found | None:
        own, num_known = self._own, len(token_ids)
        own.extend(token_ids[own.num_tokens :])
        suffix = token_ids[-MOST_ALIKE:]
        # Of many places with one hash only the latest are compared: go on at the one before.
        place = self._place + num_known - self._num_known if self._place else 0
        found = own.find(suffix, num_following, place)
        self._place, self._num_known = found.place if found else 0, num_known
        for corpus in self._answers.of(self._cache_salt):
            other = corpus.find(suffix, num_following)
            if other and (found is None or other.num_matched > found.num_matched):
                found = other
        return found


class RecentAnswers:
    """The latest answers, apart for each cache salt, in at most so many bytes.

    Half of them are forgotten at once: those before the latest half.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._young: dict[str, Corpus] = {}
        self._old: dict[str, Corpus] = {}

    def add(self, request: Request) -> None:
        """Keep the answer to a request that has ended, and the last tokens before it."""
        if not self._max_bytes or request.num_output_tokens == 0:
            return
        first = max(0, request.num_prompt_tokens - ANSWER_MIN_TOKENS)
        token_ids, salt = [*request.token_ids[first:], _BREAK], request.memory.cache_salt
        if self._num_bytes_with(salt, len(token_ids)) > self._max_bytes // 2:
            self._old, self._young = self._young, {}
        if self._num_bytes_with(salt, len(token_ids)) <= self._max_bytes // 2:
            self._young.setdefault(salt, Corpus(ANSWER_MIN_TOKENS)).extend(token_ids)

    def of(self, cache_salt: str) -> list[Corpus]:
        return [each[cache_salt] for each in (self._young, self._old) if cache_salt in each]

    def _num_bytes_with(self, cache_salt: str, num_tokens: int) -> int:
        others = sum(c.num_bytes_with(0) for salt, c in self._young.items() if salt != cache_salt)
        its = self._young.get(cache_salt) or Corpus(ANSWER_MIN_TOKENS)
        return others + its.num_bytes_with(num_tokens)

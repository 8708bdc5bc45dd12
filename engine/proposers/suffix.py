"""Drafts what followed the last tokens where they occurred before: in a sequence, in answers.

Places are found as in LZ77. A table has, for every hash of a few tokens, the latest place behind
them, and each place names the one before. So a step looks at a bounded number of places, however
long the text is.
"""

from array import array
from collections import OrderedDict
from itertools import count

import numpy as np

from ..request import Request
from .lookup import Found

MOST_ALIKE = 32  # tokens that are compared to see how sure a place is
MOST_PLACES = 16  # that a lookup compares, the latest first
ANSWER_MIN_TOKENS = 4  # that must agree with an answer to another request
MOST_SALTS = 4096  # whose answers are found
BYTES_PER_TOKEN = 20  # of capacity: 8 of the token, 4 of the place before, 8 of the table
_MARGIN = MOST_ALIKE + 1  # so that there is something before the first token
_BREAK = -1  # no token: behind a text, and before the first one
_SALT = 1 << 32  # a token of salt i is kept as i * _SALT + token
_FACTOR, _SPREAD, _MASK = 1_000_003, 0x9E3779B97F4A7C15, 2**64 - 1
_SOON = 8  # tokens within which most places differ
_MANY = 40  # new places that numpy enters faster than a loop
_LEAST_CAPACITY = 512


class Corpus:
    """Tokens, and the places behind each run of `min_tokens` of them.

    A place is the number of tokens before it.
    """

    def __init__(
        self, min_tokens: int, capacity: int = _LEAST_CAPACITY, *, has_breaks: bool = False
    ) -> None:
        """`capacity`: for how many tokens there is room from the start. `has_breaks`: they are of
        several texts, whose ends are known.
        """
        self.num_tokens = self._num_indexed = 0
        self._min_tokens, self._capacity, self._has_breaks = min_tokens, 1, has_breaks
        # [_MARGIN + capacity + 1]: a break is behind the last token
        self._tokens = array("q", [_BREAK]) * (_MARGIN + 2)
        # hash -> place, place -> the one before with this hash; 0: none
        self._latest, self._earlier = array("i", [0, 0]), array("i", [0])
        self._grow(capacity)

    def extend(self, token_ids: list[int], salt: int = 0) -> None:
        num_tokens = self.num_tokens + len(token_ids)
        if num_tokens > self._capacity:
            self._grow(-(-3 * num_tokens // (2 * self._capacity)))
        first, end = _MARGIN + self.num_tokens, _MARGIN + num_tokens
        self._tokens[first : end + 1] = array("q", [*token_ids, _BREAK])
        if salt:
            self._tokens_np[first:end] += salt * _SALT
        self.num_tokens = num_tokens

    def end_text(self) -> None:
        """What comes next is another text, behind a break."""
        self.num_tokens += 1

    def start_over(self) -> None:
        """Write over the oldest texts from now on: over the first, and those behind it."""
        self.num_tokens = self._num_indexed = 0

    def find(
        self, suffix: list[int], num_following: int, place: int = 0, salt: int = 0
    ) -> Found | None:
        """How the text went on where it had the longest part of this suffix.

        Of several such places the latest counts of those that go on with the most frequent token.
        `place` is compared as well. Where the text ends it is taken to begin again at its place.
        """
        if salt:
            suffix = [salt * _SALT + token_id for token_id in suffix]
        places = self._places(suffix[-self._min_tokens :])
        if 0 < place < self.num_tokens and place not in places:
            places.append(place)
        if not places:
            return None
        longest, best = self._most_alike(places, suffix[: -MOST_ALIKE - 1 : -1])
        if longest < self._min_tokens:
            return None
        leading = self._leading(best) if len(best) > 1 else best
        line = self._following(leading[0], num_following)
        shares = self._shares(leading, line, len(best)) if len(best) > 1 else None
        token_ids = line.tolist()
        if self._has_breaks and _BREAK in token_ids:
            token_ids = token_ids[: token_ids.index(_BREAK)]
            if not token_ids:
                return None
        if salt:
            token_ids = [token_id - salt * _SALT for token_id in token_ids]
        return Found(token_ids, longest, shares, leading[0])

    def _places(self, token_ids: list[int]) -> list[int]:
        """The latest places behind these tokens, or what has the same hash."""
        self.index()
        places: list[int] = []
        if len(token_ids) < self._min_tokens:
            return places
        place = self._latest[self._bucket(token_ids)]
        end, capacity, earlier = self.num_tokens, self._capacity, self._earlier
        before = end
        for _ in range(MOST_PLACES):
            # Behind the end texts are older. A place that was written over names a later one.
            after, before = before, place if place < end else place - capacity
            if place == 0 or before >= after:
                break
            places.append(place)
            place = earlier[place]
        return places

    def _most_alike(self, places: list[int], back: list[int]) -> tuple[int, list[int]]:
        """How many tokens before any of these places are those of `back`, in turn, and at which.

        Most places differ soon: token by token they are compared together.
        """
        tokens, last, most, num = self._tokens, _MARGIN - 1, len(back), 0
        while len(places) > 1 and num < min(most, _SOON):
            token_id, offset = back[num], last - num
            more = [p for p in places if tokens[offset + p] == token_id]
            if not more:
                return num, places
            places, num = more, num + 1
        whole = array("q", back)
        alike = [_num_equal(tokens[last + p : last + p - most : -1], whole) for p in places]
        longest = max(alike)
        return longest, [p for p, num in zip(places, alike, strict=True) if num == longest]

    def _leading(self, places: list[int]) -> list[int]:
        """Those of these places that go on with the most frequent token."""
        firsts, counts = [self._tokens[_MARGIN + place] for place in places], dict[int, int]()
        for token_id in firsts:
            counts[token_id] = counts.get(token_id, 0) + 1
        most = max(counts, key=counts.__getitem__)
        return [place for place, first in zip(places, firsts, strict=True) if first == most]

    def _shares(self, places: list[int], line: "array[int]", num_places: int) -> list[float] | None:
        """Of each token of a line, at how many of all places all is so until there; None: at all.

        `places` are those that go on with its first token. They are compared as in `_most_alike`.
        """
        tokens, num_tokens, shares = self._tokens, len(line), [len(places) / num_places]
        most = min(num_tokens, _SOON, *map(self._num_behind, places))
        while len(places) > 1 and len(shares) < most:
            token_id, offset = line[len(shares)], _MARGIN + len(shares)
            places = [p for p in places if tokens[offset + p] == token_id]
            shares.append(len(places) / num_places)
        ends = sorted(_num_equal(self._following(place, num_tokens), line) for place in places)
        for i, end in enumerate(ends):
            shares += [(len(places) - i) / num_places] * (end - len(shares))
        return shares if shares[-1] < 1 else None

    def _following(self, place: int, num_tokens: int) -> "array[int]":
        """The tokens behind a place; where the text ends it begins again there."""
        num_behind, first = self._num_behind(place), _MARGIN + place
        line = self._tokens[first : first + min(num_tokens, num_behind)]
        if num_behind < num_tokens:
            line = (line * -(-num_tokens // num_behind))[:num_tokens]
        return line

    def _num_behind(self, place: int) -> int:
        """How many tokens follow, with the last break."""
        end = self.num_tokens if place < self.num_tokens else self._capacity
        return end + self._has_breaks - place

    def _bucket(self, token_ids: "list[int] | array[int]") -> int:
        key = 0
        for token_id in token_ids:
            key = key * _FACTOR + token_id
        return ((key * _SPREAD & _MASK) >> 32) * len(self._latest) >> 32

    def index(self) -> None:
        """Enter all places but the last: nothing follows it yet."""
        new = range(self._num_indexed + 1, self.num_tokens)
        if len(new) > _MANY:
            self._index_at_once(new)
        else:
            tokens, latest, earlier = self._tokens, self._latest, self._earlier
            end, first = _MARGIN, _MARGIN - self._min_tokens
            for place in new:
                bucket = self._bucket(tokens[first + place : end + place])
                earlier[place] = latest[bucket]
                latest[bucket] = place
        self._num_indexed = max(self._num_indexed, self.num_tokens - 1)

    def _index_at_once(self, new: range) -> None:
        """The same without Python's time for each."""
        latest_np, earlier_np = (
            np.frombuffer(each, np.int32) for each in (self._latest, self._earlier)
        )
        keys_np = np.zeros(len(new), dtype=np.uint64)
        for first in range(_MARGIN + new.start - self._min_tokens, _MARGIN + new.start):
            token_ids_np = self._tokens_np[first : first + len(new)].view(np.uint64)
            keys_np = keys_np * np.uint64(_FACTOR) + token_ids_np
        hashes_np = (keys_np * np.uint64(_SPREAD)) >> np.uint64(32)
        buckets_np = hashes_np * np.uint64(len(latest_np)) >> np.uint64(32)
        order_np = np.argsort(buckets_np, kind="stable")
        buckets_np, places_np = buckets_np[order_np], order_np + new.start
        begins_np = np.append(True, buckets_np[1:] != buckets_np[:-1])  # of places with one hash
        earlier_np[places_np[1:]] = places_np[:-1]
        earlier_np[places_np[begins_np]] = latest_np[buckets_np[begins_np]]
        ends_np = np.roll(begins_np, -1)
        latest_np[buckets_np[ends_np]] = places_np[ends_np]

    def _grow(self, factor: int) -> None:
        """Make room for so many times as much.

        No place is entered again: each bucket of hashes becomes `factor` of them, which all begin
        with the places that it had.
        """
        more = (factor - 1) * self._capacity
        self._capacity += more
        self._tokens = _longer(self._tokens, more)
        self._tokens_np = np.frombuffer(self._tokens, np.int64)
        self._earlier = _longer(self._earlier, more)
        latest_np = np.frombuffer(self._latest, np.int32)
        self._latest = array("i", bytes(4 * factor * len(latest_np)))
        if self._num_indexed:
            np.frombuffer(self._latest, np.int32)[:] = np.repeat(latest_np, factor)


def _longer(numbers: "array[int]", num_more: int) -> "array[int]":
    """With so many zeros behind them."""
    longer = array(numbers.typecode, bytes(numbers.itemsize * (len(numbers) + num_more)))
    longer[: len(numbers)] = numbers
    return longer


def _num_equal(a: "array[int]", b: "array[int]") -> int:
    """How many tokens two texts begin with alike."""
    if a == b:
        return len(a)
    num = 0
    for x, y in zip(a, b, strict=True):
        if x != y:
            break
        num += 1
    return num


class Suffixes:
    """What the last tokens of a sequence led to earlier in it, or in recent answers."""

    def __init__(self, min_tokens: int, cache_salt: str, answers: "RecentAnswers") -> None:
        """Of the answers it looks into those of its own cache salt."""
        self._own, self._answers, self._cache_salt = Corpus(min_tokens), answers, cache_salt
        self._place = self._num_known = 0  # where the text went on as it does now, and when

    def find(self, token_ids: list[int], num_following: int) -> Found | None:
        own, num_known = self._own, len(token_ids)
        own.extend(token_ids[own.num_tokens :])
        suffix = token_ids[-MOST_ALIKE:]
        # Of many places with one hash only the latest are compared: go on at the one before.
        place = self._place + num_known - self._num_known if self._place else 0
        found = own.find(suffix, num_following, place)
        self._place, self._num_known = found.place if found else 0, num_known
        if found is None or found.num_matched < MOST_ALIKE:
            other = self._answers.find(self._cache_salt, suffix, num_following)
            if other and (found is None or other.num_matched > found.num_matched):
                found = other
        return found


class RecentAnswers:
    """The latest answers, in at most so many bytes, which it takes at once.

    All are in one text, in which the oldest are written over once it is full. The salt is a part
    of each token there, so a request finds only answers of its own cache salt.
    """

    def __init__(self, max_bytes: int) -> None:
        self._capacity = min(max_bytes // BYTES_PER_TOKEN - _MARGIN, 2**31 - 1)
        self.corpus = Corpus(ANSWER_MIN_TOKENS, max(1, self._capacity), has_breaks=True)
        self._salts: OrderedDict[str, int] = OrderedDict()  # their numbers, the last used last
        self._numbers = count()

    def add(self, request: Request) -> None:
        """Keep the answer to a request that has ended, and the last tokens before it."""
        kept = request.num_output_tokens + min(ANSWER_MIN_TOKENS, request.num_prompt_tokens)
        if request.num_output_tokens == 0 or kept >= self._capacity:
            return
        salt = request.memory.cache_salt
        if salt not in self._salts:
            self._salts[salt] = next(self._numbers) % 2**31
        self._salts.move_to_end(salt)
        if len(self._salts) > MOST_SALTS:
            self._salts.popitem(last=False)
        if self.corpus.num_tokens + kept >= self._capacity:
            self.corpus.start_over()
        self.corpus.extend(request.token_ids[-kept:], self._salts[salt])
        self.corpus.end_text()
        self.corpus.index()  # here, and not all that has come at once in the next lookup

    def find(self, cache_salt: str, suffix: list[int], num_following: int) -> Found | None:
        salt = self._salts.get(cache_salt)
        return None if salt is None else self.corpus.find(suffix, num_following, salt=salt)

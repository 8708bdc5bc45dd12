"""The memory that requests hold until they are answered, all of them together.

What JSON takes in memory is counted before it is read: as lists and objects it may take 200 times
its bytes. A request holds this much of the server's budget until its answer needs less.
"""

from starlette.requests import HTTPConnection

from .errors import APIError, queue_full

# Bytes of memory at most, for each such sign, as measured: of an object with the model that is made
# of it, of a list, and of a value in either. Signs within texts count: a text may be JSON, too.
OBJECT_BYTES = 1024
LIST_BYTES = 96
VALUE_BYTES = 72
# What a body may take in memory, in multiples of server.max_body_bytes. No prompt needs as much:
# the densest are ids of tokens, of which a body of 4 MB may have 900,000.
MAX_GROWTH = 16


def memory_of(json: bytes) -> int:
    """The most memory that this JSON takes once it is read, in bytes."""
    text = len(json) * (1 if json.isascii() else 4)  # one such character widens the whole text
    values = json.count(b",") + json.count(b":")
    objects, lists = json.count(b"{"), json.count(b"[")
    return len(json) + text + values * VALUE_BYTES + objects * OBJECT_BYTES + lists * LIST_BYTES


def json_bytes(request: HTTPConnection) -> int:
    """How many bytes of JSON were read for a request: about as long is the work for it."""
    num_bytes: int = request.state.held.json_bytes
    return num_bytes


class HeldBudget:
    """What all requests together, and each of them, may hold."""

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_each = min(max_bytes, MAX_GROWTH * max_body_bytes)
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Take so many bytes, or give them back; raises APIError if there is no room."""
        if num_bytes > 0 and self.held_bytes + num_bytes > self._max_bytes:
            raise queue_full(
                "The requests that are being answered take all the memory that this server gives "
                f"them, {self._max_bytes:,} bytes (server.max_bodies_bytes). Try again."
            )
        self.held_bytes += num_bytes

    def check(self, num_bytes: int, *, of_json: bool = False) -> None:
        """Raise APIError if one request may not hold as many, or as many of JSON."""
        if num_bytes > (self._max_bytes_each if of_json else self._max_bytes):
            raise APIError(
                413,
                f"The JSON of this request may take {num_bytes:,} bytes of memory, for its lists, "
                "objects and numbers; this server gives a request at most "
                f"{self._max_bytes_each:,} (server.max_body_bytes, server.max_bodies_bytes). Send "
                "fewer.",
                code="body_too_large",
            )


class Held:
    """What one request holds of the budget; `request.state.held`."""

    def __init__(self, budget: HeldBudget) -> None:
        self._budget = budget
        self._bytes = 0
        self.json_bytes = 0  # of JSON that was read for the request

    def hold(self, num_bytes: int) -> None:
        """From now on it holds so many; raises APIError if there is no room."""
        self._budget.check(num_bytes)
        self._budget.take(num_bytes - self._bytes)
        self._bytes = num_bytes

    def pass_on(self) -> "Held":
        """What it holds, for work that goes on after the request; it holds nothing any more."""
        other = Held(self._budget)
        other._bytes, self._bytes = self._bytes, 0
        return other

    def arrived(self, num_bytes: int) -> None:
        """More bytes of the body have come; raises APIError."""
        self.hold(self._bytes + num_bytes)

    def read(self, json: bytes) -> None:
        """This JSON is about to be read; raises APIError. What came of the body is a part of it."""
        num_bytes = memory_of(json)
        self._budget.check(num_bytes, of_json=True)
        self.hold(num_bytes if not self.json_bytes else self._bytes + num_bytes)
        self.json_bytes += len(json)

    def keep(self, num_bytes: int, *, body: bool) -> None:
        """The answer needs no more than so many, and, if so, the body; raises APIError."""
        self.hold(num_bytes + body * self._bytes)

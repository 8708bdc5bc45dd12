"""Responses that are kept for a while, so that later ones can continue from them."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

ENTRY_BYTES = 1024  # memory of a stored response, besides its JSON
ITEM_BYTES = 256  # memory of one of its input items, besides its JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """Kept as JSON, so that its size is known: as objects it may take 25 times as much."""

    id: str
    response: bytes
    input_items: tuple[tuple[str, bytes], ...]  # of its own request: each one's id and JSON
    conversation: bytes  # the items of everything before it, and its output
    key: str | None  # digest of the API key that owns it
    in_background: bool  # it was made so

    @property
    def num_bytes(self) -> int:
        items = sum(ITEM_BYTES + len(json) for _, json in self.input_items)
        return ENTRY_BYTES + items + len(self.response) + len(self.conversation)


class Running(Protocol):
    """A response in the background that is not done yet."""

    key: str | None  # as of a stored one

    def as_json(self) -> str:
        """Its JSON, as far as it has come."""

    async def cancel(self) -> None:
        """End it; it is stored then."""


class ResponseStore:
    """The most recently used responses, up to a number of bytes, in the memory of this process; and
    those that are running in the background.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.running: dict[str, Running] = {}  # by id

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0

    def get(self, response_id: str, key: str | None) -> StoredResponse | None:
        """The response; None if there is none, or if it belongs to another key."""
        stored = self._stored.get(response_id)
        if stored is None or stored.key != key:
            return None
        self._stored.move_to_end(response_id)
        return stored

    def get_running(self, response_id: str, key: str | None) -> Running | None:
        """Like `get`, for one that is not done yet."""
        running = self.running.get(response_id)
        return running if running is not None and running.key == key else None

    def put(self, stored: StoredResponse) -> None:
        """Keep it, and drop the least recently used; one that is too large is not kept at all."""
        if stored.num_bytes > self._max_bytes:
            return
        self._stored[stored.id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def delete(self, stored: StoredResponse) -> None:
        """Delete a response that `get` has returned."""
        self._num_bytes -= self._stored.pop(stored.id).num_bytes

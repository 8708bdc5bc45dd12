"""What one sequence leaves on the device while it runs."""

import hashlib
from array import array


class SequenceMemory:
    """The pages of one sequence, and how far target and draft have come in them.

    The first `num_computed_tokens` tokens have KV of the target, the first
    `num_draft_computed_tokens` KV of the draft. A draft model falls behind while a sequence decodes
    plainly; it computes what it missed before it drafts again. A head reads along with the target,
    and cannot catch up.

    Only `DeviceMemory` writes here. A sequence that gives its pages back gets a new object, which
    makes void what is in flight.
    """

    def __init__(
        self, token_ids: list[int], cache_salt: str = "", page_hashes: list[bytes] | None = None
    ) -> None:
        """`token_ids` is the sequence's own list, which grows; `page_hashes` are those known."""
        self.token_ids = token_ids
        self.cache_salt = cache_salt
        self.page_hashes = page_hashes or []  # of the leading full pages
        self.slot: int | None = None  # where layers keep their states of it
        # Of each group of layers; those behind its window are the dummy page.
        self.pages: list[list[int]] = []
        # (group, column, page) of the block tables that the device does not know yet.
        self.changed_pages: list[tuple[int, int, int]] = []
        # Behind how many tokens its state will be kept, and whether for sure of use; ascending.
        self.state_edges: list[tuple[int, bool]] = []
        self.num_computed_tokens = 0
        self.num_draft_computed_tokens = 0
        self.num_shared_tokens = 0  # found when it was seated
        self.num_recorded_pages = 0  # leading pages that can be found by their hashes
        self.num_recorded_draft_pages = 0

    @property
    def head_reads_along(self) -> bool:
        """Whether a head has read all that the target computed, and something of it in this seat:
        it drafts from the last row that it has read.
        """
        num_read = self.num_draft_computed_tokens
        return num_read == self.num_computed_tokens > self.num_shared_tokens

    def has_unrecorded_pages(self, page_size: int) -> bool:
        """Whether target or draft has filled a page since the last one that was recorded."""
        return (
            self.num_computed_tokens >= (self.num_recorded_pages + 1) * page_size
            or self.num_draft_computed_tokens >= (self.num_recorded_draft_pages + 1) * page_size
        )

    def rows_up_to_an_edge(self, num_rows: int) -> int:
        """Of the next rows of a prompt, those in front of where its state will be kept."""
        edges = self.state_edges
        return min(num_rows, edges[0][0] - self.num_computed_tokens) if edges else num_rows

    def emptied(self) -> "SequenceMemory":
        """The memory of the same tokens without any pages."""
        return SequenceMemory(self.token_ids, self.cache_salt, self.page_hashes)

    def set_page(self, group: int, column: int, page: int) -> None:
        self.changed_pages.append((group, column, page))
        self.pages[group][column : column + 1] = [page]

    def hash_pages(self, num_pages: int, page_size: int, lookahead: int) -> list[bytes]:
        """The hashes of at least the first `num_pages` pages.

        A page's hash begins with that of the page before, and covers `lookahead` tokens after it.
        """
        hashes = self.page_hashes
        for i in range(len(hashes), num_pages):
            parent = hashes[-1] if hashes else _salt_hash(self.cache_salt)
            end = (i + 1) * page_size + lookahead
            tokens = array("q", self.token_ids[i * page_size : end]).tobytes()
            # Cryptographic, so that no tenant can construct two prefixes with the same hash.
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return hashes


def _salt_hash(cache_salt: str) -> bytes:
    """Empty without a salt; otherwise as long as a page's hash, but never equal to one."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"cache_salt").digest()

"""What layers keep of every token on the device, in pages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """What a layer, or a group of layers, keeps of every token."""

    bytes_per_token: int
    window: int | None = None  # tokens that a row attends to, its own included; None: all
    lookahead: int = 0  # how many tokens after its own the KV of a row depends on

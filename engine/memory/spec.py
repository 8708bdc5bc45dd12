"""What layers keep of a sequence on the device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """What a layer, or a group of layers, keeps of every token in pages."""

    bytes_per_token: int
    window: int | None = None  # tokens that a row attends to, its own included; None: all
    lookahead: int = 0  # how many tokens after its own the KV of a row depends on


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """What a layer keeps of a whole sequence in its slot, however long the sequence is."""

    bytes_per_slot: int

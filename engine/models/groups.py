"""Groups of attention layers, which share pages and a block table."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..memory.spec import PagedSpec
from .attention import PagedAttention
from .network import PagedLayers


@dataclass(slots=True)
class LayerGroup:
    """Layers that keep KV of the same positions for the same time."""

    window: int | None  # tokens behind which pages are given back; None: they are all kept
    layers: list[tuple[PagedLayers, PagedAttention]] = field(default_factory=list)

    @property
    def spec(self) -> PagedSpec:
        """Of all its layers together."""
        return PagedSpec(
            sum(owner.bytes_per_token(layer) for owner, layer in self.layers),
            self.window,
            max((owner.lookahead for owner, _ in self.layers), default=0),
        )

    def bind(self, index: int, num_pages: int, page_size: int) -> None:
        """Allocate the pages of its layers, which read the block table of this index."""
        for owner, layer in self.layers:
            owner.bind_layer(layer, num_pages, page_size)
            layer.group = index

    def free(self) -> None:
        for _, layer in self.layers:
            layer.pages = None


def grouped(owners: Iterable[PagedLayers], max_model_len: int) -> list[LayerGroup]:
    """The layers of models: first those that keep everything, then those of each window.

    No sequence is longer than `max_model_len` tokens.
    """
    first = LayerGroup(None)
    groups: dict[int, LayerGroup] = {}
    for owner in owners:
        keeps_all = owner.may_fall_behind or owner.reads_one_table
        for layer in owner.attentions:
            window = layer.window
            if window is None or window >= max_model_len or keeps_all:
                first.layers.append((owner, layer))
            else:
                groups.setdefault(window, LayerGroup(window)).layers.append((owner, layer))
    return [first, *groups.values()]

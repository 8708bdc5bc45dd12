"""Pages come back from host memory as they were, all layers of a group together."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from tiny_models import DEVICE

from outrider.engine.models import host_pages
from outrider.engine.models.attention import PagedAttention
from outrider.engine.models.groups import LayerGroup
from outrider.engine.models.network import PagedLayers

PAGE, NUM_PAGES = 3, 12


class Layers(PagedLayers):
    def __init__(self, dtype: torch.dtype, shapes: list[tuple[int, int, int]]) -> None:
        self.dtype, self.device, self.vocab_size = torch.bfloat16, DEVICE, 1
        self.cache_dtype = dtype
        self._attentions = [PagedAttention(heads, heads, k, v, 1.0) for heads, k, v in shapes]

    @property
    def attentions(self) -> list[PagedAttention]:
        return self._attentions


def bound(layers: Layers) -> LayerGroup:
    group = LayerGroup(None, [(layers, layer) for layer in layers.attentions])
    group.bind(0, NUM_PAGES, PAGE)
    for k, _ in enumerate(layers.attentions):
        for pages in layers.attentions[k].bound_pages:
            bits = pages.view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8))
    return group


def contents(group: LayerGroup, pages: list[int]) -> list[torch.Tensor]:
    return [
        of_layer[torch.tensor(pages)].view(torch.uint8).cpu()
        for _, layer in group.layers
        for of_layer in layer.bound_pages
    ]


@pytest.mark.parametrize("waits", ["wait", "before_steps"])
@pytest.mark.parametrize("buffer_bytes", [1, 10**6])  # on a GPU: page by page, or all at once
@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        (torch.bfloat16, [(2, 8, 8), (1, 16, 4)]),
        (torch.float32, [(1, 3, 5)]),
        (torch.float8_e4m3fn, [(2, 8, 8), (1, 3, 3)]),
        (torch.float16, []),  # every layer has a window, so the first group is empty
    ],
)
def test_pages_come_back_as_they_were(
    dtype: torch.dtype,
    shapes: list[tuple[int, int, int]],
    buffer_bytes: int,
    waits: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_pages, "_BUFFER_BYTES", buffer_bytes)
    groups = [bound(Layers(torch.bfloat16, [(1, 4, 4)])), bound(Layers(dtype, shapes))]
    copies = host_pages.host_pages_of(DEVICE)(groups, [3, 6], PAGE, DEVICE, None, 0)
    saved, others = [7, 2, 3, 11, 5], [1, 4, 6, 8, 9, 10]
    before, untouched = contents(groups[1], saved), contents(groups[1], others)
    copies.save(1, saved, [4, 0, 1, 2, 5])
    for _, layer in groups[1].layers:
        for pages in layer.bound_pages:
            pages.view(torch.uint8)[torch.tensor(saved)] = 0
    copies.load(1, [0, 1, 2, 4, 5], [2, 3, 11, 7, 5])
    getattr(copies, waits)()  # the host waits, or the device
    for was, now in zip(before, contents(groups[1], saved), strict=True):
        assert torch.equal(was, now)
    for was, now in zip(untouched, contents(groups[1], others), strict=True):
        assert torch.equal(was, now)
    assert copies.has_loaded()


def test_steps_and_what_goes_to_the_host_wait_for_what_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once steps wait for a page, its room in host memory may be given to another."""
    pages, steps, saving = object.__new__(host_pages.PinnedHostPages), Mock(), Mock()
    pages._device, pages._saving, pages._loaded = DEVICE, saving, Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    pages.before_steps()
    for stream in (steps, saving):
        stream.wait_event.assert_called_once_with(pages._loaded)


def test_the_host_waits_for_the_copies_of_a_load_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pages go to others; an event behind all of its copies was never recorded."""
    pages, loading = object.__new__(host_pages.PinnedHostPages), Mock()
    pages._device, pages._loading, pages._loaded = DEVICE, loading, Mock()
    pages._on_their_way, pages._sizes = set(), [16]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(pages, "_rows", Mock(side_effect=RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        pages.load(0, [1], [2])
    pages._loaded.record.assert_not_called()
    pages.wait()
    loading.synchronize.assert_called_once_with()

"""Copies to host memory as a GPU makes them, late, and as a broken one makes them."""

import random
from collections.abc import Callable, Sequence

import torch

from outrider.engine.engine import Engine
from outrider.engine.memory.host_tier import PageCopies
from outrider.engine.models.host_pages import HostPages

Pages = Sequence[int]


class LateCopies(PageCopies):
    """Fills pages when asked for the nth time whether it has; until then they are NaN."""

    def __init__(self, copies: HostPages, times: Callable[[], int]) -> None:
        self._copies, self._times, self._left = copies, times, 0
        self._begun: list[tuple[int, Pages, Pages]] = []

    @property
    def num_bytes(self) -> int:
        return self._copies.num_bytes

    def save(self, group: int, pages: Pages, host_pages: Pages) -> None:
        self._copies.save(group, pages, host_pages)

    def load(self, group: int, host_pages: Pages, pages: Pages) -> None:
        for of_layer in self._copies.tensors(group):
            spoilt = torch.nan if of_layer.is_floating_point() else 0
            of_layer[torch.tensor(pages, dtype=torch.int64)] = spoilt
        self._begun.append((group, host_pages, pages))
        self._left = self._times()

    def before_steps(self) -> None:
        self.wait()

    def has_loaded(self) -> bool:
        self._left -= 1
        if self._left < 0:
            self.wait()
        return not self._begun

    def wait(self) -> None:
        for begun in self._begun:
            self._copies.load(*begun)
        self._begun.clear()
        self._copies.wait()


class FailingCopies(LateCopies):
    """Fails in one of its calls."""

    def __init__(self, copies: HostPages, fails: str) -> None:
        super().__init__(copies, lambda: 1)

        def fail(*_: object) -> bool:
            raise RuntimeError("the bus is gone")

        setattr(self, fails, fail)


def with_late_copies(engine: Engine, rng: random.Random) -> Engine:
    """The engine, whose pages come back from host memory some steps later."""
    return with_copies(engine, lambda copies: LateCopies(copies, lambda: rng.choice([0, 1, 3])))


def with_copies(engine: Engine, wrap: Callable[[HostPages], LateCopies]) -> Engine:
    """The engine, whose pages go to host memory and back by other copies."""
    lag, found = engine.scheduler.lag, engine.worker.host_pages
    assert found is not None
    counts, copies = found
    engine.worker.host_pages = counts, wrap(copies)  # type: ignore[assignment]
    engine.start_over()
    engine.scheduler.lag = lag
    return engine

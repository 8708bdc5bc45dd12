"""Counts how far a stage of the start has come."""

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

Counted = TypeVar("Counted")

# (done, total), of the stage of a ReportProgress.
ReportCounts = Callable[[int, int], None]


def counted(items: Collection[Counted], report: ReportCounts) -> Iterator[Counted]:
    """Report in front of each item how many are done."""
    for done, item in enumerate(items):
        report(done, len(items))
        yield item


def counter(total: int, report: ReportCounts) -> Callable[[], None]:
    """Report that nothing is done and, at each call of what is returned, one more."""
    done = itertools.count(1)
    report(0, total)
    return lambda: report(next(done), total)

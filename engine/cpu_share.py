"""How many threads a step takes on a CPU: all of them, or fewer while a neighbour needs the cores.

OpenMP's threads meet at several barriers a layer. A thread that waits there spins, which is what
makes a machine of our own fast; beside a neighbour it takes the core from the very thread that it
waits for. One thread waits for nobody (benchmarks/log/cpu.md).
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

_STAT = Path("/proc/stat")
_INTERVAL_S = 0.25  # the kernel counts in hundredths
# Of a core. Our own HTTP process takes less than the first; between the two nothing changes.
_CALM, _BUSY = 0.12, 0.25


class CPUShare:
    """Sets the number of threads before a step, by what other processes take of our cores."""

    def __init__(self, counts: Sequence[int]) -> None:
        """`counts` are the numbers of threads to choose from, the most first."""
        self._counts = counts
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._seen: tuple[float, float, float] | None = None

    def begin(self) -> None:
        """Look from now on: work begins. What others did while there was none says nothing."""
        self._seen = self._look() if len(self._counts) > 1 else None

    def adapt(self) -> None:
        """Take as many threads as there are cores for; looks a few times a second."""
        if self._seen is None or time.monotonic() - self._seen[0] < _INTERVAL_S:
            return
        before, self._seen = self._seen, self._look()
        if self._seen is None:
            return
        elapsed_s, idle_s, own_s = (b - a for a, b in zip(before, self._seen, strict=True))
        others = len(self._cpus) - (idle_s + own_s) / elapsed_s
        now = torch.get_num_threads()
        wanted = fitting(self._counts, now, len(self._cpus), others)
        if wanted != now:
            torch.set_num_threads(wanted)

    def _look(self) -> tuple[float, float, float] | None:
        """The clock, what our cores have idled, and what we have computed, in seconds.

        None if this system does not tell.
        """
        try:
            idle_s = _idle_s(_STAT.read_text(), self._cpus)
        except (OSError, ValueError, IndexError):
            return None
        return (time.monotonic(), idle_s, time.process_time()) if self._cpus else None


def fitting(counts: Sequence[int], now: int, num_cpus: int, others: float) -> int:
    """The most threads for which there are cores, beside others who keep so many cores busy."""
    for count in counts:
        crowd = count + others - num_cpus
        if crowd < (_BUSY if count <= now else _CALM):
            return count
    return counts[-1]


def _idle_s(stat: str, cpus: set[int]) -> float:
    """Seconds that these CPUs were idle, of the text of /proc/stat."""
    ticks = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name[3:].isdigit() and name.startswith("cpu") and int(name[3:]) in cpus:
            ticks += int(fields[3]) + int(fields[4])  # idle, and idle with a disk to wait for
    return ticks / os.sysconf("SC_CLK_TCK")

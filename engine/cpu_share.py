"""How many threads a CPU step uses: all of them, or fewer while other processes need the cores.

OpenMP threads meet at several barriers in every layer, and they spin while they wait. That is fast
on an idle machine. On a busy one, a spinning thread can take the core from the very thread that it
waits for; with one thread there are no barriers (benchmarks/log/cpu.md).
"""

import os
import time
from collections.abc import Sequence

import torch

try:
    import psutil
except ImportError:  # then nothing reports how busy others are
    psutil = None

_INTERVAL_S = 0.25  # the kernel counts in hundredths of a second
# Shares of a core. Our own HTTP process stays below the first; between the two nothing changes.
_CALM, _BUSY = 0.12, 0.25


def set_threads(num_threads: int | None, num_ranks: int, device: torch.device) -> None:
    """Let torch use so many threads; None: its own choice, which ranks on a CPU divide."""
    if num_threads is None and num_ranks > 1 and device.type == "cpu":
        num_threads = max(1, torch.get_num_threads() // num_ranks)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


class CPUShare:
    """Sets the number of threads before a step, by how busy other processes keep our cores."""

    def __init__(self, counts: Sequence[int]) -> None:
        """`counts` are the numbers of threads to choose from, largest first."""
        self._counts = counts
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._seen: tuple[float, float, float] | None = None

    def begin(self) -> None:
        """Start measuring, because work begins. What happened while we were idle says nothing."""
        self._seen = self._look() if len(self._counts) > 1 else None

    def adapt(self) -> None:
        """Use as many threads as there are free cores; measures a few times a second."""
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
        """The clock, the idle time of our cores and our own CPU time so far, in seconds.

        None if the system does not report them.
        """
        try:
            # By place, not by number: right unless a CPU before ours is switched off.
            times = psutil.cpu_times(percpu=True)
            idle_s = sum(times[cpu].idle + times[cpu].iowait for cpu in self._cpus)
        except (OSError, IndexError, AttributeError):
            return None
        return (time.monotonic(), idle_s, time.process_time()) if self._cpus else None


def fitting(counts: Sequence[int], now: int, num_cpus: int, others: float) -> int:
    """The largest count that fits on the cores if other processes keep `others` of them busy."""
    for count in counts:
        crowd = count + others - num_cpus
        if crowd < (_BUSY if count <= now else _CALM):
            return count
    return counts[-1]

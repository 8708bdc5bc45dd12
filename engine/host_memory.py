"""How much memory this process may still take: the machine's, or what its control group leaves."""

import math
from pathlib import Path

from .config import CacheConfig, ConfigError, SpeculationConfig
from .memory.budget import Budget

_MOST_SHARE = 0.9  # of the free memory of the host; pinned memory is never swapped out
_MACHINE = Path("/proc/meminfo")
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Bytes that can be allocated without swapping or going beyond a container's limit."""
    return min([_left_by_machine(), *_left_by_groups()])


def check_host_memory(
    cache: CacheConfig, speculation: SpeculationConfig, budget: Budget | None = None
) -> None:
    """Refuse settings by which more memory of the host would be used than is free, before any of it
    is allocated. `budget`: of a KV cache that lies there, too.

    Raises ConfigError saying what fits.
    """
    room_bytes, num_pages = available_bytes(), cache.num_pages
    if budget is not None and num_pages is not None:
        pages_bytes = budget.num_bytes(num_pages)
        if pages_bytes > room_bytes:
            raise ConfigError(
                f"cache.num_pages is {num_pages}, which take {pages_bytes / 2**30:.1f} GiB, but "
                f"the machine has room for {budget.most_within(room_bytes)}: set it to that at "
                "most, or leave it out"
            )
        room_bytes -= pages_bytes
    room_bytes = int(room_bytes * _MOST_SHARE)
    for name, num_bytes, unit, unit_bytes, digits in (
        ("cache.host_gib", cache.host_bytes, "GiB", 2**30, 1),
        ("speculation.suffix_answers_mib", speculation.answers_bytes, "MiB", 2**20, 0),
    ):
        if num_bytes > room_bytes:
            most = math.floor(room_bytes / unit_bytes * 10**digits) / 10**digits
            raise ConfigError(
                f"{name} is {num_bytes / unit_bytes:g}, but the machine has room for {most:g} "
                f"{unit}: set it to that at most, or to 0"
            )
        room_bytes -= num_bytes


def _left_by_machine() -> int:
    if not _MACHINE.exists():  # no Linux
        import psutil

        return int(psutil.virtual_memory().available)
    fields = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
    return int(fields["MemAvailable"].removesuffix("kB")) * 1024


def _left_by_groups() -> list[int]:
    """What each limited control group (version 2) around this process leaves.

    File pages that nobody uses count as left, since the kernel drops them first.
    """
    left = []
    try:
        lines = _OWN.read_text().splitlines()
        own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::"))
        for group in (_ROOT / own, *(_ROOT / own).parents):
            limit = group / "memory.max"
            if limit.is_file() and (most := limit.read_text().strip()) != "max":
                stat = dict(s.split() for s in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
                left.append(max(0, int(most) - used))
    except (OSError, ValueError, KeyError, StopIteration):  # another version, or not for us to read
        pass
    return left

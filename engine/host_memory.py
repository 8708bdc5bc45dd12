"""How much memory this process may still take: the machine's, or what its control group leaves."""

from pathlib import Path
from typing import NamedTuple

_MACHINE = Path("/proc/meminfo")
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Bytes that can be allocated without swapping or going beyond a container's limit."""
    return min([_left_by_machine(), *_left_by_groups()])


def obtainable_bytes() -> int | None:
    """Bytes beyond which the kernel ends a process: what is available, with swap and with all
    pages of files. None if that is not known: outside Linux swap may grow.
    """
    if not _MACHINE.exists():
        return None
    swap = _of_machine("SwapFree")
    return min([_left_by_machine() + swap, *(group.most_left(swap) for group in _groups())])


def _left_by_machine() -> int:
    if not _MACHINE.exists():  # no Linux
        import psutil

        return int(psutil.virtual_memory().available)
    return _of_machine("MemAvailable")


def _of_machine(name: str) -> int:
    fields = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
    return int(fields[name].removesuffix("kB")) * 1024


class _Group(NamedTuple):
    """A control group (version 2) with a limit; all in bytes."""

    limit: int
    used: int
    stat: dict[str, int]
    swap_left: int | None  # None: as much as the machine has

    def left(self) -> int:
        """File pages that nobody uses count as left, since the kernel drops them first."""
        return max(0, self.limit - self.used + self.stat["inactive_file"])

    def most_left(self, machine_swap: int) -> int:
        """With what the kernel can drop or swap out before it ends a process."""
        swap = machine_swap if self.swap_left is None else min(self.swap_left, machine_swap)
        names = ("active_file", "slab_reclaimable")
        return self.left() + swap + sum(self.stat.get(name, 0) for name in names)


def _left_by_groups() -> list[int]:
    """What each limited control group around this process leaves."""
    return [group.left() for group in _groups()]


def _groups() -> list[_Group]:
    """The limited control groups around this process."""
    found = []
    try:
        lines = _OWN.read_text().splitlines()
        own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::"))
        for group in (_ROOT / own, *(_ROOT / own).parents):
            if (limit := _limit(group / "memory.max")) is None:
                continue
            stat = dict(s.split() for s in (group / "memory.stat").read_text().splitlines())
            sizes = {name: int(size) for name, size in stat.items()}
            used = int((group / "memory.current").read_text())
            swap = _limit(group / "memory.swap.max")
            if swap is not None:
                swap = max(0, swap - int((group / "memory.swap.current").read_text()))
            found.append(_Group(limit, used, sizes, swap))
    except (OSError, ValueError, KeyError, StopIteration):  # another version, or not for us to read
        pass
    return found


def _limit(file: Path) -> int | None:
    """None if there is none."""
    if not file.is_file() or (limit := file.read_text().strip()) == "max":
        return None
    return int(limit)

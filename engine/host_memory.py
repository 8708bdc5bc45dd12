"""How much memory this process may still take: the machine's, or what its control group leaves."""

from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Bytes that can be allocated without swapping or going beyond a container's limit."""
    return min([_left_by_machine(), *_left_by_groups()])


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

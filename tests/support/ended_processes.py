"""Whether a process has ended."""

import psutil


def has_ended(pid: int) -> bool:
    """Also if nobody has waited for it yet, or it ends at this moment."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

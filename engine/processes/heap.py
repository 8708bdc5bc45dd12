"""Returns memory that a process has freed, but the C library keeps, to the system."""

import ctypes
from contextlib import suppress


def give_memory_back() -> None:
    """Return freed memory: glibc would keep 100 MB after loading, half a gigabyte after a large
    text. To free cycles as well, call `gc.collect` first.
    """
    with suppress(AttributeError):  # only glibc has this call
        ctypes.CDLL(None).malloc_trim(0)

"""Returns memory that a process has freed, but the C library keeps, to the system."""

import ctypes
import gc


def give_memory_back() -> None:
    """Return memory that loading has freed; the C library alone would keep 100 MB of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc only
    if trim is not None:
        trim(0)

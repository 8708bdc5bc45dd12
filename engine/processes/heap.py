"""The memory that a process has freed and the C library keeps."""

import ctypes
import gc


def give_memory_back() -> None:
    """Return what loading has freed to the system; by itself the C library keeps 100 MB of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)

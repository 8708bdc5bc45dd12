"""Triton; or, on a system that has none (macOS), what lets the files of kernels be imported.

There the references beside the kernels run, and a kernel that is launched says what is missing.
"""

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    from . import no_triton as triton
    from .no_triton import gdc_launch_dependents, gdc_wait
    from .no_triton import language as tl

__all__ = ["gdc_launch_dependents", "gdc_wait", "tl", "triton"]

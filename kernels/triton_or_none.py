"""Triton; or, on a system without it (macOS), stand-ins so that kernel files can be imported.

There the references run, and launching a kernel raises an error that names what is missing.
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

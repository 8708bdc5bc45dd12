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

# Gluon's names change: what is written in it here is for these versions. Of others nothing is
# imported, since a name that our modules use may be missing there.
HAS_GLUON = getattr(triton, "__version__", "").startswith(("3.6.", "3.7."))
if HAS_GLUON:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    except ImportError:
        HAS_GLUON = False
if not HAS_GLUON:
    from . import no_triton as gluon
    from .no_triton import TensorDescriptor
    from .no_triton import language as gl
    from .no_triton import language as hopper

__all__ = [
    "HAS_GLUON",
    "TensorDescriptor",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "hopper",
    "tl",
    "triton",
]

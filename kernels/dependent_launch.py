"""Programmatic dependent launch: a kernel's programs start while the kernels before it drain.

Until they wait, they may read weights, and what was written before the first kernel of their kind,
which is launched plainly: a kernel may allow the next one to start before it waits itself.
"""

import functools

import torch

from .triton_or_none import gdc_launch_dependents, gdc_wait, tl, triton


@functools.cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Options for launching a kernel that calls the two functions below."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@triton.jit
def start_next_kernel(DEPENDENT: tl.constexpr):
    """The next kernel may start, once every program of this one has come by or ended."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """All that was launched before is done and visible.

    Every program has to come by, also one without work: what follows waits for this kernel alone.
    """
    if DEPENDENT:
        gdc_wait()

"""Programmatic dependent launch: a kernel's programs start while the kernel before it finishes.

Before it calls `wait_for_inputs`, a kernel may only read weights and what was written up to the
first kernel of the chain, which is launched in the ordinary way: the second starts after its end.
The output of the kernels between may not be there yet: each may let the next one start before it
has waited itself.
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
    """Let the next kernel start, once every program of this one has called this or ended."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Wait until everything launched before is done and visible.

    Every program must call this, also one without work: the next kernel waits for this one only.
    """
    if DEPENDENT:
        gdc_wait()

"""Whether a call runs as a Triton kernel or as the plain-torch reference beside it."""

import functools
import os

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(tensor: torch.Tensor) -> bool:
    """CUDA tensors go to the kernels; so do CPU tensors if Triton's interpreter is switched on."""
    return tensor.is_cuda or INTERPRET


@functools.cache
def num_programs(device: torch.device, per_sm: int) -> int:
    """How many programs fill a device. Results must not depend on this number."""
    if device.type != "cuda":
        return 4
    return per_sm * torch.cuda.get_device_properties(device).multi_processor_count

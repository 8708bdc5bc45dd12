"""Where a call runs: as a Triton kernel, or as the plain-torch reference beside it."""

import functools
import os

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(tensor: torch.Tensor) -> bool:
    """CUDA tensors go to the kernels; so do CPU tensors when Triton's interpreter was asked for."""
    return tensor.is_cuda or INTERPRET


@functools.cache
def num_programs(device: torch.device, per_sm: int) -> int:
    """Programs that fill a device; what they compute does not depend on how many they are."""
    if device.type != "cuda":
        return 4
    return per_sm * torch.cuda.get_device_properties(device).multi_processor_count

"""Whether a call runs as a Triton kernel or as the plain-torch reference beside it."""

import functools
import os

import torch

from .triton_or_none import triton

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(tensor: torch.Tensor) -> bool:
    """CUDA tensors go to the kernels; so do CPU tensors if Triton's interpreter is switched on."""
    return tensor.is_cuda or INTERPRET


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether it is a GPU with instructions for FP8: Ada, Hopper or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a Hopper GPU, such as an H100 or H200."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The most shared memory that a program can take: 227 KB on an H200, 99 KB on an RTX 4090."""
    # Kept, since every launch of a product asks: the driver takes 1.4 ms to list an H200's
    # properties.
    if device.type != "cuda":
        return 1 << 20
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"])


def num_stages_of(most: int, stage_bytes: int, device: torch.device, kept_bytes: int = 0) -> int:
    """How many blocks a program loads ahead: `most`, or as many as shared memory holds beside
    `kept_bytes`.
    """
    return max(1, min(most, (shared_bytes(device) - kept_bytes) // stage_bytes))


@functools.cache
def num_programs(device: torch.device, per_sm: int) -> int:
    """How many programs fill a device. Results must not depend on this number."""
    if device.type != "cuda":
        return 4
    return per_sm * torch.cuda.get_device_properties(device).multi_processor_count

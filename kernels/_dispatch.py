"""Where a call runs: as a Triton kernel, or as the plain-torch reference beside it."""

import os

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(tensor: torch.Tensor) -> bool:
    """CUDA tensors go to the kernels; so do CPU tensors when Triton's interpreter was asked for."""
    return tensor.is_cuda or INTERPRET

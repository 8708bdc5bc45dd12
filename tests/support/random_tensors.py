"""Tensors of random numbers, from a seed."""

from collections.abc import Callable

import torch
from torch import Tensor
from verification import DEVICE


def normals(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE
) -> Callable[..., Tensor]:
    """A function from a shape to normally distributed numbers, others at each call."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)

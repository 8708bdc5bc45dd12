"""Copies between the device and the host that do not make the host wait."""

import numpy as np
import torch
from torch import Tensor


def on_host(*tensors: Tensor) -> list[np.ndarray]:
    """Copies on the host, to be read once the device has done all that was launched before."""
    return [_on_host(tensor) for tensor in tensors]


def _on_host(tensor: Tensor) -> np.ndarray:
    if not tensor.is_cuda:
        return tensor.numpy().copy()
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True).numpy()


def uploaded(array_np: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, made after everything launched before; the host does not wait."""
    return staged(torch.from_numpy(array_np), device).to(device, non_blocking=True)


def staged(values: Tensor, device: torch.device) -> Tensor:
    """The values in memory from which a GPU can copy with `non_blocking=True`.

    The caller may drop the result at once: the allocator keeps the memory until the copy is done.
    """
    return values.pin_memory() if device.type == "cuda" else values

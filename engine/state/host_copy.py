"""Copies between the device and the host that do not make the host wait."""

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """Copies tensors of one device to the host, after everything launched before."""

    def __init__(self, *tensors: Tensor) -> None:
        self._done = None
        self._host = tensors
        if tensors[0].is_cuda:
            self._host = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors
            )
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def arrays(self) -> list[np.ndarray]:
        """Wait for the copies, but not for anything launched after them."""
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._host]


def uploaded(array_np: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, made after everything launched before; the host does not wait."""
    return staged(torch.from_numpy(array_np), device).to(device, non_blocking=True)


def staged(values: Tensor, device: torch.device) -> Tensor:
    """The values in memory from which a GPU can copy with `non_blocking=True`.

    The caller may drop the result at once: the allocator keeps the memory until the copy is done.
    """
    return values.pin_memory() if device.type == "cuda" else values

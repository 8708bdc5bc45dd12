"""Copies between the device and the host that the host need not wait for at once."""

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """Starts to copy tensors of one device behind all that is launched already."""

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
        """Wait until the copies are there; not for what was launched after them."""
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._host]


def uploaded(array_np: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, behind all that is launched already, while nobody waits."""
    return staged(torch.from_numpy(array_np), device).to(device, non_blocking=True)


def staged(values: Tensor, device: torch.device) -> Tensor:
    """Where the device reads them behind all that is launched already, while nobody waits.

    For copies with `non_blocking`; the allocator keeps the memory until they are done.
    """
    return values.pin_memory() if device.type == "cuda" else values

"""Copies between the device and the host that the host need not wait for at once."""

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """Starts to copy a tensor behind all that is launched already."""

    def __init__(self, tensor: Tensor) -> None:
        self._done = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def numpy(self) -> np.ndarray:
        """Wait until the copy is there; not for what was launched after it."""
        if self._done is not None:
            self._done.synchronize()
        array: np.ndarray = self._host.numpy()
        return array


def uploaded(array_np: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, behind all that is launched already, while nobody waits."""
    return staged(torch.from_numpy(array_np), device).to(device, non_blocking=True)


def staged(values: Tensor, device: torch.device) -> Tensor:
    """Where the device reads them behind all that is launched already, while nobody waits.

    For copies with `non_blocking`; the allocator keeps the memory until they are done.
    """
    return values.pin_memory() if device.type == "cuda" else values

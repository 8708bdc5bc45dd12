"""The tensors of a model directory, whatever files hold them."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from .weights import Linear, Weight

Progress = Callable[[int, int], None]  # is called with (tensors read, tensors in all)


class AnyCheckpoint(ABC):
    """Tensors and layers, read by transformers' names when they are asked for."""

    has_quantised: bool  # whether any layer read so far was quantised

    def __init__(self, dtype: torch.dtype, device: torch.device, progress: Progress) -> None:
        self._dtype, self._device = dtype, device
        self._progress, self._num_read = progress, 0

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @property
    @abstractmethod
    def _num_tensors(self) -> int: ...

    @abstractmethod
    def stored(self, name: str) -> Tensor:
        """A tensor in the dtype that it is stored in, or float32 if it is quantised."""

    @abstractmethod
    def tensor(self, *names: str) -> Tensor:
        """Tensors of the same width, stacked along the first dimension, in the model's dtype."""

    @abstractmethod
    def _weight(self, names: tuple[str, ...], *, is_head: bool = False) -> Weight: ...

    @abstractmethod
    def _tied(self, embedding: Tensor) -> Weight:
        """The weight of a head that shares the matrix of the embedding."""

    def linear(self, *names: str) -> Linear:
        """Linear layers that read the same input, as one layer with the outputs of all.

        Raises UnsupportedFormatError if one is in a format that is not served.
        """
        return Linear(self._weight(names), self._bias(names))

    def head(self, name: str, tied: Tensor | None = None) -> Linear:
        """The layer that computes the logits; `tied` is the embedding if it shares its matrix."""
        if tied is not None:
            return Linear(self._tied(tied), None)
        return Linear(self._weight((name,), is_head=True), self._bias((name,)))

    def _bias(self, names: tuple[str, ...]) -> Tensor | None:
        biases = [f"{name}.bias" for name in names]
        return self.tensor(*biases) if biases[0] in self else None

    def _count(self) -> None:
        self._num_read += 1
        self._progress(self._num_read, self._num_tensors)

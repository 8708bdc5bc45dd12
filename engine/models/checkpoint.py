"""The tensors of a model directory: of safetensors files, or of one file of torch.save.

`gguf_checkpoint.py` reads the same from a GGUF file.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.expert_matrix import for_expert
from outrider.kernels.model.narrow_matrix import NarrowMatrix, dequantise, stack
from outrider.kernels.model.rms_norm import Norm

from ..progress import ReportCounts
from .admission import FinalRefusalError, UnsupportedModelError
from .narrow_weight import Narrow, Scaled, Stacked, check_fp8
from .opened_files import open_files
from .shares import WHOLE, Cut, Outputs, Share, num_outputs, sections_of, why_cut
from .weight_files import name_in_text
from .weights import Axis, Dense, Linear, Matrix, RoundedInputs

log = logging.getLogger(__name__)

# (checkpoint, name of a layer) -> its matrix, or None if the layer is not quantised. Raises
# UnsupportedModelError.
Read = Callable[["Checkpoint", str], NarrowMatrix | None]

EMBEDDING, OUTPUT_LAYER = "model.embed_tokens", "lm_head"
# One of the tensors that describe the layer of one expert, which may lie in one of all experts'.
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.(\w+)")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Lent(NamedTuple):
    """Parameters that transformers' modules have only while they run: all might not fit at once."""

    names: Sequence[str]
    make: Callable[[], Sequence[Tensor]]
    # (inputs [T, K], i) -> those that parameter i multiplies; None: as they come
    inputs: Callable[[Tensor, int], Tensor] | None = None


class AnyCheckpoint(ABC):
    """Tensors and layers, read by transformers' names when they are asked for.

    Whatever it hands out it also keeps by these names, for a comparison with transformers' code.
    Of what has an axis it reads one rank's `share`; shapes and sizes are those of the share.
    """

    _num_tensors: int
    share: Share = WHOLE

    def __init__(self, dtype: torch.dtype, device: torch.device, report: ReportCounts) -> None:
        self.dtype, self.device = dtype, device
        self._report = report
        self._names_read: set[str] = set()
        self.tensors: dict[str, Tensor] = {}
        self.lent: list[Lent] = []

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def stored(self, name: str) -> Tensor:
        """A tensor in the dtype that it is stored in, or float32 if it is quantised."""

    @abstractmethod
    def stacked(self, *names: str, cuts: Sequence[Cut | None] = ()) -> Tensor:
        """Tensors of the same width, stacked along the first dimension, in the model's dtype.

        `cuts`: how each is shared; none are if there are none. They are not kept.
        """

    @abstractmethod
    def _tied(self, embedding: Tensor) -> Matrix:
        """The embedding as the matrix of the output layer."""

    @abstractmethod
    def weight(
        self,
        num_inputs: int,
        sizes: Mapping[str, Outputs],
        axis: Axis | None = None,
        *,
        of_expert: bool = False,
    ) -> Matrix:
        """The matrices of layers, stacked; `sizes` as in `linear`. They are not kept.

        Inputs are rounded if the format rounds them; those `of_expert` not always (see there).
        Raises as `linear` does.
        """

    def stacks_layers(self, name: str, num_layers: int) -> bool:
        """Whether `weight` reads so many layers, `part` of `experts.i`, from the tensor `name`,
        `experts.part`, and those with their scales: each may be quantised.

        Raises ValueError if it has another number of them.
        """
        return False

    @abstractmethod
    def unread(self) -> set[str]:
        """The names of tensors of which nothing was read, nor anything else of their layer."""

    def biases_left_out(self, prefix: str = "") -> list[str]:
        """The names of biases that were not read, of layers that were, if they begin with `prefix`.
        Those of zeros do not count: some quantisers give every layer one.
        """
        return []

    def tensor(self, name: str, *shape: int, cut: Cut | None = None) -> Tensor:
        """A tensor in the model's dtype; with a shape, raises ValueError if it has another."""
        self.tensors[name] = tensor = self.stacked(name, cuts=[cut])
        if shape:
            check_shape(name, tensor.shape, shape)
        return tensor

    def float32(self, name: str, *shape: int, cut: Cut | None = None) -> Tensor:
        """A tensor in float32, whatever the model's dtype; raises as `tensor` does."""
        stored = self.share.of(self.stored(name), cut)
        self.tensors[name] = tensor = stored.float().to(self.device)
        check_shape(name, tensor.shape, shape)
        return tensor

    def norm(
        self, name: str, size: int, eps: float, *, adds_one: bool = False, cut: Cut | None = None
    ) -> Norm:
        """With `adds_one` the checkpoint has what its factors are more than 1.

        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape.
        """
        weight = self.tensor(f"{name}.weight", size, cut=cut)
        # In float32: added to 1, a small number would be lost in 16 bits.
        return Norm(1 + weight.float() if adds_one else weight, eps)

    def linear(
        self,
        num_inputs: int,
        sizes: Mapping[str, Outputs],
        axis: Axis | None = None,
        order: Tensor | None = None,
    ) -> Linear:
        """Linear layers that read the same input, as one; `sizes` are their outputs, by name.

        `order`: how their outputs are to lie, each among those of its own layer; without a bias.
        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape, and
        UnsupportedModelError if a layer is in a format that is not served.
        """
        totals = {name: num_outputs(size) for name, size in sizes.items()}
        weight = self.weight(num_inputs, sizes, axis)
        if order is not None:
            weight = weight.reordered(order)
        self._lend(weight, totals, order)
        biases = [f"{name}.bias" for name in sizes]
        if biases[0] not in self:
            return Linear(weight, None, axis)
        assert order is None
        # One that is added to a sum over ranks is whole on each.
        cuts = [Cut("outputs", sections_of(size)) for size in sizes.values()]
        bias = self.stacked(*biases, cuts=cuts if axis == "outputs" else ())
        check_shape(" + ".join(biases), bias.shape, (sum(totals.values()),))
        self.tensors |= zip(biases, bias.split([*totals.values()]), strict=True)
        return Linear(weight, bias, axis)

    def tied(self, embedding: Tensor) -> Linear:
        """The output layer that shares the matrix of the embedding."""
        weight = self._tied(embedding)
        self._lend(weight, {OUTPUT_LAYER: len(embedding)})
        return Linear(weight, None)

    def _lend(self, weight: Matrix, sizes: dict[str, int], order: Tensor | None = None) -> None:
        first = [0, *accumulate(sizes.values())]
        stored = slice(None) if order is None else order.argsort()
        self.lent.append(
            Lent(
                [f"{name}.weight" for name in sizes],
                lambda: weight.dequantised()[stored].split([*sizes.values()]),
                lambda x, i: weight.taken(x, first[i]),
            )
        )

    def _count(self, name: str) -> None:
        if name not in self._names_read:
            self._names_read.add(name)
            self._report(len(self._names_read), self._num_tensors)


class Checkpoint(AnyCheckpoint):
    """Tensors are read straight to the device. Layers may be quantised."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        report: ReportCounts,
        *,
        read: Read | None = None,
        share: Share = WHOLE,
        renamed: Mapping[str, str] = {},
        warns: bool = True,
    ) -> None:
        """`read` reads quantised layers, whole. `renamed` is as in `name_in_text`. `warns`: whether
        to say that they are unpacked.

        Raises WeightFileError if files are missing or damaged.
        """
        super().__init__(dtype, device, report)
        self._read, self.share = read, share
        # Only our Triton kernels multiply by narrow matrices; elsewhere they are unpacked.
        self.keeps_narrow = uses_triton(torch.empty(0, device=device))
        self.has_quantised = False  # whether any layer read so far was quantised
        self._warned = not warns
        self._file_of = open_files(folder)
        # The text of a model that also reads images has the names of a model of text.
        self._stored_name = {name_in_text(name, renamed): name for name in self._file_of}
        self._biases = [name for name in self._stored_name if name.endswith("bias")]
        self._num_tensors = len(self._file_of)

    def __contains__(self, name: str) -> bool:
        return self._place(name)[0] in self._stored_name

    def _place(self, name: str) -> tuple[str, int | None]:
        """The name of the tensor in which a tensor lies, and which entry of it; None: all of it."""
        found = None if name in self._stored_name else _OF_EXPERT.fullmatch(name)
        if found:
            stacked = f"{found[1]}.{found[3]}"
            ends = ("",) if found[4] == "weight" else (f"_{found[4]}", f"_{found[4][7:]}")
            for end in ends:  # transformers leaves out `weight_` in front of `scale_inv`
                if f"{stacked}{end}" in self._stored_name:
                    return f"{stacked}{end}", int(found[2])
        return name, None

    def view(self, name: str) -> Tensor:
        """A tensor as it is stored: a view of its file, on the CPU, so that no copy is left behind.

        Raises KeyError naming the tensor if there is none, ValueError if an expert has none in it.
        """
        place, entry = self._place(name)
        stored_name = self._stored_name[place]
        file = self._file_of[stored_name]
        view: Tensor = file[stored_name] if isinstance(file, dict) else file.get_tensor(stored_name)
        if entry is None:
            return view
        if view.ndim == 0 or entry >= len(view):
            raise ValueError(f"{place} is {tuple(view.shape)}, which has no entry {entry}")
        return view[entry]

    def stacks_layers(self, name: str, num_layers: int) -> bool:
        if self._read is None or name not in self._stored_name:
            return False
        check_shape(f"the number of experts of {name}", self.view(name).shape[:1], (num_layers,))
        return True

    def part(self, name: str, index: int) -> Tensor:
        """One entry of the first dimension, in its stored dtype, on the device."""
        self._count(name)
        return self.view(name)[index].to(self.device)

    def stored(self, name: str) -> Tensor:
        self._count(self._place(name)[0])
        return self.view(name).to(self.device)

    def stacked(self, *names: str, cuts: Sequence[Cut | None] = ()) -> Tensor:
        each = zip(names, cuts or [None] * len(names), strict=True)
        views = [self.share.of(self.view(name), cut) for name, cut in each]
        for name, view in zip(names, views, strict=True):
            if view.dtype not in _FLOATS:
                raise ValueError(
                    f"{name} is of dtype {view.dtype}; {', '.join(map(str, _FLOATS))} are read here"
                )
        num_rows = sum(len(view) for view in views)
        out = torch.empty(num_rows, *views[0].shape[1:], dtype=self.dtype, device=self.device)
        first = 0
        for name, view in zip(names, views, strict=True):
            out[first : first + len(view)].copy_(view)
            first += len(view)
            self._count(self._place(name)[0])
        return out

    def unread(self) -> set[str]:
        # A quantised layer may have tensors that say nothing more, such as zero points of zero.
        layers = {name.rpartition(".")[0] for name in self._names_read}
        return {name for name in self._stored_name if name.rpartition(".")[0] not in layers}

    def biases_left_out(self, prefix: str = "") -> list[str]:
        biases = {name for name in self._biases if name.startswith(prefix)} - self._names_read
        left_out = sorted(biases - self.unread()) if biases else []
        return [name for name in left_out if self.view(name).any()]

    def integers(self, name: str) -> Tensor:
        """A tensor of integers or booleans, on the CPU."""
        view = self.view(name)
        if view.is_floating_point():
            raise ValueError(f"{name} is of dtype {view.dtype}; it holds integers")
        return view.long()

    def _tied(self, embedding: Tensor) -> Matrix:
        matrix = self._read(self, EMBEDDING) if self._read else None
        return Dense(embedding) if matrix is None else self._narrow(matrix)

    def weight(
        self,
        num_inputs: int,
        sizes: Mapping[str, Outputs],
        axis: Axis | None = None,
        *,
        of_expert: bool = False,
    ) -> Matrix:
        names = [f"{layer}.weight" for layer in sizes]
        cuts = [
            Cut(axis, sections_of(size) if axis == "outputs" else ()) for size in sizes.values()
        ]
        shapes = [(num_outputs(size), num_inputs) for size in sizes.values()]
        for name, shape, cut in zip(names, shapes, cuts, strict=True):
            if name in self and self.view(name).dtype != torch.uint8:  # two numbers a byte
                check_shape(name, self.view(name).shape, self.share.whole(shape, cut))
        matrices = [
            self._share_of(layer, cut, of_expert) for layer, cut in zip(sizes, cuts, strict=True)
        ]
        for name, matrix, shape in zip(names, matrices, shapes, strict=True):
            if matrix is not None:
                self.has_quantised = True
                check_shape(name, matrix.shape, shape)
        weights: list[Matrix] = []
        each = zip(names, cuts, matrices, strict=True)
        for is_plain, neighbours in groupby(each, lambda one: one[2] is None):
            some, of_some, narrow = zip(*neighbours, strict=True)
            if is_plain:
                weights.append(Dense(self.stacked(*some, cuts=of_some)))
            else:
                stacked = stack(narrow)
                weights += map(self._narrow, narrow if stacked is None else [stacked])
        if len(weights) == 1:
            return weights[0]
        if all(isinstance(weight, Dense) for weight in weights):  # unpacked
            return Dense(torch.cat([weight.dequantised() for weight in weights]))
        return Stacked(weights)

    def _share_of(self, layer: str, cut: Cut, is_of_expert: bool) -> NarrowMatrix | None:
        """This rank's share of a layer that is quantised; None if it is not.

        Raises FinalRefusalError if a scale would be cut.
        """
        try:
            matrix = self._read(self, layer) if self._read else None
        except UnsupportedModelError:
            raise
        except ValueError as error:
            raise ValueError(f"{layer}: {error}") from None
        if matrix is None:
            return None
        if is_of_expert:  # as the whole layer has it, so that it is alike in any share
            matrix = for_expert(matrix)
        if cut.axis == "inputs":
            has_order, size = matrix.order is not None, self.share.size
            reason = why_cut(layer, size, matrix.num_in, matrix.group, has_order=has_order)
            if reason is not None:
                raise FinalRefusalError(reason)
        return self.share.of_narrow(matrix, cut)

    def _narrow(self, matrix: NarrowMatrix) -> Matrix:
        if self.keeps_narrow:
            check_fp8(matrix.kind, self.device)
            return (Scaled if matrix.rounds_inputs else Narrow)(matrix, self.dtype)
        self.warn_once(
            f"the weights are unpacked to {str(self.dtype).removeprefix('torch.')}, since only a "
            "GPU multiplies by them as they are: they take the memory and the time of the plain "
            "model"
        )
        plain = Dense(dequantise(matrix, self.dtype))
        return plain if matrix.row_format is None else RoundedInputs(plain, matrix.row_format)

    def warn_once(self, warning: str) -> None:
        if not self._warned:
            log.warning("%s", warning)
            self._warned = True


def check_shape(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises ValueError naming both shapes if they differ."""
    if found != shape:
        raise ValueError(
            f"{name} is {' x '.join(map(str, found))}; by its config it must be "
            f"{' x '.join(map(str, shape))}"
        )

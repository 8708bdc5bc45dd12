"""Whether ranks would cut the inputs of a layer that share a scale: by the headers of its files."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedConfig

from outrider.kernels.model.narrow_matrix import NVFP4_GROUP, SMALL_GROUPS, STEP

from ..models.families.base import Family
from ..models.shares import why_cut
from ..models.unread import layer_of
from ..models.weight_files import Stored, name_in_text, stored_tensors

log = logging.getLogger(__name__)

# The layers whose inputs ranks share, by transformers' names: those that parts read so. A tensor
# may be of one of them, or of the same one of all experts.
SHARED = re.compile(r"(model\.layers\.\d+\..*\b(?:o_proj|out_proj|down_proj))(?:[._](\w+))?")
_ALL_EXPERTS = ".experts.down_proj"
_PLAIN = {"BF16", "F16", "F32", "F64"}


class ScaledInputs(NamedTuple):
    """The inputs of a quantised layer, which ranks share."""

    layer: str
    num_in: int
    group: int  # inputs that have a scale
    has_order: bool  # groups are not of neighbours

    def why_cut(self, num_ranks: int) -> str | None:
        """Why so many ranks cannot share them; None: they can."""
        return why_cut(self.layer, num_ranks, self.num_in, self.group, has_order=self.has_order)


def scaled_inputs(path: str, config: PreTrainedConfig, family: type[Family]) -> list[ScaledInputs]:
    """Of the layers of a quantised model, in order, the first with each width and group; up to one
    whose files are not as expected, which whoever reads them says.
    """
    found: dict[tuple[int, int, bool], ScaledInputs] = {}
    try:
        for each in _scaled_inputs(Path(path), config.num_hidden_layers, family.renamed):
            found.setdefault(each[1:], each)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        log.debug("the groups of inputs cannot be counted", exc_info=True)
    return [*found.values()]


def _scaled_inputs(
    folder: Path, num_layers: int, renamed: Mapping[str, str]
) -> Iterator[ScaledInputs]:
    layers: dict[str, dict[str, Stored]] = defaultdict(dict)
    for stored_name, stored in stored_tensors(folder).items():
        found = SHARED.fullmatch(name_in_text(stored_name, renamed))
        if found is None or layer_of(found[1]) >= num_layers:
            continue  # such as an MTP head, which is not shared
        layer, part = found[1], found[2] or "weight"
        if layer.endswith(_ALL_EXPERTS):
            layer = layer.replace(_ALL_EXPERTS, ".experts.0.down_proj")
            part = "weight" if part == "weight" else f"weight_{part.removeprefix('weight_')}"
            stored = stored._replace(shape=stored.shape[1:])
        layers[layer][part] = stored
    for layer in sorted(layers, key=lambda name: (layer_of(name), name.endswith("down_proj"))):
        parts = layers[layer]
        num_in, num_groups = _groups_in(parts)
        sizes = chain((NVFP4_GROUP, *SMALL_GROUPS), range(STEP, num_in + STEP, STEP))
        group = next((size for size in sizes if -(-num_in // size) == num_groups), num_in)
        index = parts.get("g_idx") or parts.get("weight_g_idx")
        has_order = index is not None and bool((np.diff(_integers(index)) < 0).any())
        yield ScaledInputs(layer, num_in, group, has_order)


def _groups_in(parts: Mapping[str, Stored]) -> tuple[int, int]:
    """The inputs of a layer and their groups, by the ends of its tensors' names; (0, 1): it is not
    quantised, or not in a way that is known here: whoever reads it says so.
    """
    if {"qweight", "qzeros", "scales"} <= parts.keys():
        num_groups, num_out = parts["scales"].shape
        num_rows, num_columns = parts["qweight"].shape
        packs_inputs = num_columns == num_out  # GPTQ; AWQ packs outputs
        per_word = num_out // parts["qzeros"].shape[1]
        return num_rows * (per_word if packs_inputs else 1), num_groups
    scale = parts.get("weight_scale_inv") or parts.get("weight_scale")
    codes = parts.get("weight_packed") or parts.get("weight")
    if scale is None or codes is None or codes.dtype in _PLAIN:
        return 0, 1
    by_block = {2: -1, 4: 2}.get(len(scale.shape))
    num_groups = 1 if by_block is None else scale.shape[by_block]
    if "weight_shape" in parts:
        return int(_integers(parts["weight_shape"])[-1]), num_groups
    return codes.shape[-1] * (2 if codes.dtype == "U8" else 1), num_groups


def _integers(stored: Stored) -> np.ndarray:
    dtype = np.dtype(stored.dtype.lower().replace("i", "int"))
    count = (stored.end - stored.start) // dtype.itemsize
    return np.fromfile(stored.path, dtype, count, offset=stored.start)

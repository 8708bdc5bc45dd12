"""Says which tensors of a checkpoint are no part of the model that its config describes."""

import logging
import math
import re
from collections.abc import Collection, Iterable
from typing import Any

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")
# Buffers that older versions of transformers saved; their values follow from the config.
_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
_MTP_PROJECTION = ".eh_proj."  # what a layer has that is an MTP head, with GGUF's names, too
_SHOWN = 3


def warn_of_unread(
    path: str, names: Collection[str], config: Any, ignored: Iterable[str] | None = None
) -> None:
    """Log the names of tensors that were not read, and whether they are whole layers.

    `config` is that of the text. `ignored` are patterns of names that the model's class leaves out
    on purpose. So are the layers of MTP heads, however many the config counts.
    """
    patterns = [re.compile(pattern) for pattern in (*_BUFFERS, *(ignored or ()))]
    num_layers = getattr(config, "num_hidden_layers", None) or math.inf
    of_heads = {layer_of(name) for name in names if _MTP_PROJECTION in name}
    unread = [
        name
        for name in sorted(names)
        if layer_of(name) not in of_heads and not any(pattern.search(name) for pattern in patterns)
    ]
    beyond = {layer for layer in map(layer_of, unread) if layer >= num_layers}
    if not unread:
        return
    shown = ", ".join(unread[:_SHOWN]) + (", …" if len(unread) > _SHOWN else "")
    why = "have no place in the model that its config describes"
    if beyond:
        why = f"are of layers {min(beyond)} to {max(beyond)}, and its config counts {num_layers}"
    log.warning("%s: %d of its tensors %s; they are not read: %s", path, len(unread), why, shown)


def layer_of(name: str) -> int:
    """The number of the layer that a tensor belongs to, by its name; -1: none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1

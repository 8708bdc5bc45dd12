"""Says which tensors of a checkpoint are no part of the model that its config describes."""

import logging
import re
from collections.abc import Collection
from typing import Any

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")
# Buffers that older versions of transformers saved; their values follow from the config.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
_SHOWN = 3


def warn_of_unread(path: str, names: Collection[str], config: Any, ignored: Any) -> None:
    """Log the names of tensors that were not read, and whether they are whole layers.

    `ignored` are patterns of names that the model's class leaves out on purpose. So are the layers
    for multi-token prediction that the config counts.
    """
    patterns = [re.compile(pattern) for pattern in ignored or ()]
    text_config = config.get_text_config()
    num_layers = getattr(text_config, "num_hidden_layers", None)
    num_known = (num_layers or 0) + (getattr(text_config, "num_nextn_predict_layers", None) or 0)
    unread, layers = [], set()
    for name in sorted(names):
        found = _LAYER.search(name)
        layer = int(found[1]) if found and num_layers else -1
        is_mtp = (num_layers or 0) <= layer < num_known
        if is_mtp or _BUFFERS.search(name) or any(pattern.search(name) for pattern in patterns):
            continue
        unread.append(name)
        if num_layers and layer >= num_layers:
            layers.add(layer)
    if not unread:
        return
    shown = ", ".join(unread[:_SHOWN]) + (", …" if len(unread) > _SHOWN else "")
    why = "have no place in the model that its config.json describes"
    if layers:
        why = (
            f"are of layers {min(layers)} to {max(layers)}, and its config.json counts {num_layers}"
        )
    log.warning("%s: %d of its tensors %s; they are not read: %s", path, len(unread), why, shown)

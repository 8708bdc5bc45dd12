"""The embedding, output layer and vocabulary of a head: its own, or those of its target."""

import logging
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import OUTPUT_LAYER, AnyCheckpoint, Checkpoint
from ..network import Network
from ..weights import Linear
from .config import HeadConfig, HeadError

_MTP_EMBEDDING = "mtp.embed_tokens.weight"

log = logging.getLogger(__name__)


def read_embedding(config: HeadConfig, checkpoint: Checkpoint, target: Network) -> Tensor:
    """The head's own embedding, or the target's if it has none or a copy. Shape: -> [V, hidden].

    Raises HeadError if the target's has another width.
    """
    theirs, width, name = target.input_embedding, config.layers.hidden_size, "embed_tokens.weight"
    if name not in checkpoint:
        if theirs.shape[1] != width:
            raise HeadError(
                f"it has no embedding of its own, and the target's is {theirs.shape[1]} wide where "
                f"the head is {width}"
            )
        return theirs
    own = checkpoint.tensor(name, len(theirs), width)
    return theirs if own.shape == theirs.shape and torch.equal(own, theirs) else own


def read_mtp_embedding(
    config: Any, path: str, checkpoint: AnyCheckpoint, target: Network
) -> Tensor:
    """The target's embedding, or the own one of an MTP head whose config says that it has one.

    Shape: -> [V, hidden].
    """
    if not getattr(config, "mtp_use_dedicated_embeddings", False):
        return target.input_embedding
    if _MTP_EMBEDDING in checkpoint:
        return checkpoint.tensor(_MTP_EMBEDDING, *target.input_embedding.shape)
    log.warning(
        "%s: its MTP head has an embedding of its own by its config "
        "(mtp_use_dedicated_embeddings), and its files hold none: it reads the target's",
        path,
    )
    return target.input_embedding


def read_output_layer(config: HeadConfig, checkpoint: Checkpoint, target: Network) -> Linear:
    """The head's own output layer, or the target's if it has none.

    Raises HeadError if the target's has another size.
    """
    width = config.layers.hidden_size
    if f"{OUTPUT_LAYER}.weight" in checkpoint or config.block is None:
        return checkpoint.linear(width, {OUTPUT_LAYER: config.draft_vocab_size})
    if (config.draft_vocab_size, width) != target.output_layer.weight.shape:
        size, target_width = target.output_layer.weight.shape
        raise HeadError(
            f"it has no lm_head of its own, and the target's is {size} x {target_width} where the "
            f"head's must be {config.draft_vocab_size} x {width}"
        )
    return target.output_layer


def read_target_ids(config: HeadConfig, checkpoint: Checkpoint, target: Network) -> Tensor | None:
    """The target's id for each id of the draft; None if they are equal. Shape: -> [V'].

    Raises HeadError if the head drafts tokens that the target does not have, or does not say which.
    """
    vocab_size, size = len(target.input_embedding), config.draft_vocab_size
    config.check_vocabulary(vocab_size)
    if "d2t" not in checkpoint:
        if size != vocab_size:
            raise HeadError(
                f"it drafts {size} of {vocab_size} tokens, but its file has no map of them (d2t)"
            )
        return None
    drawn = checkpoint.integers("t2d") if "t2d" in checkpoint else None
    most = min(vocab_size, target.vocab_size)
    return ids_of_target(config, checkpoint.integers("d2t"), drawn, most).to(target.device)


def ids_of_target(config: HeadConfig, offsets: Tensor, drawn: Tensor | None, most: int) -> Tensor:
    """The target's ids, below `most`, of the tokens that a head drafts. Raises HeadError.

    Shape: offsets (d2t) [V'] from a draft's id to the target's, drawn (t2d) [V] -> [V'].
    """
    vocab_size, size = config.layers.vocab_size, config.draft_vocab_size
    if offsets.shape != (size,):
        raise HeadError(f"d2t has {len(offsets)} entries for a draft vocabulary of {size}")
    ids = torch.arange(size) + offsets
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= most):
        raise HeadError(
            f"d2t leads to token ids from {int(ids.min())} to {int(ids.max())}; the target's are 0 "
            f"to {most - 1}"
        )
    if not bool((ids.diff() > 0).all()):
        raise HeadError("d2t leads two of its tokens to the same id of the target, or out of order")
    if drawn is not None:
        is_one = drawn.shape == (vocab_size,) and torch.equal(drawn.nonzero().squeeze(1), ids)
        if not is_one:
            raise HeadError("t2d and d2t disagree about which tokens it drafts")
    return ids


def check_mask_token(token_id: int | None, num_embeddings: int) -> None:
    if token_id is None:
        raise HeadError("its config names no mask token (mask_token_id)")
    if not 0 <= token_id < num_embeddings:
        raise HeadError(f"its mask token is {token_id}, but there are {num_embeddings} embeddings")

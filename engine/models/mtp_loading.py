"""Loads the MTP head in a target's own checkpoint."""

from pathlib import Path
from typing import Any

from outrider.kernels.model.rms_norm import Norm

from ..config import ModelConfig
from .any_checkpoint import Progress, no_progress
from .any_head import check_settings, errors_told, head_checkpoint
from .architectures import load_config
from .checkpoint import Checkpoint
from .families import window_of
from .head_config import HeadError
from .llama import LlamaReader
from .loading import quantised_format, rounds_weights
from .mtp import MtpHead
from .mtp_config import MtpDialect, mtp_dialect
from .network import Network


def load_mtp_head(
    config: ModelConfig,
    target: Network,
    progress: Progress = no_progress,
) -> MtpHead:
    """Load the MTP head of the target in this directory, which from now on hands out its states.

    The head computes in the target's dtype. Raises HeadError naming the model.
    """
    folder = Path(config.path)
    with errors_told(f"the MTP head of {config.path} cannot draft for it"):
        check_settings(config, target)
        if config.head_layers is not None:
            raise HeadError("it reads the last layer's states: leave draft.head_layers out")
        dialect = mtp_dialect(folder)
        hf_config: Any = load_config(folder)
        quantised = quantised_format(config, hf_config)
        read = quantised[1] if quantised else None
        checkpoint = head_checkpoint(config, target, progress, read=read)
        head = _build(dialect, hf_config, checkpoint, target)
        target.tap([len(target.attentions)])
    if target.device.type == "cpu":
        head.pack(rounds=rounds_weights(config, is_draft=True))
    return head


def _build(dialect: MtpDialect, config: Any, checkpoint: Checkpoint, target: Network) -> MtpHead:
    reader, width = LlamaReader(checkpoint, config), config.hidden_size
    rope = reader.rope(target.device)

    def norm(name: str) -> Norm:
        read = reader.norm(name)
        return read._replace(weight=read.weight + dialect.norm_offset)

    return MtpHead(
        embedding_norm=norm(dialect.embedding_norm),
        hidden_norm=norm(dialect.hidden_norm),
        hidden_first=dialect.hidden_first,
        zeroes_first=dialect.zeroes_first,
        fc=reader.linear(2 * width, **{dialect.projection: width}),
        embedding=target.input_embedding,
        blocks=[reader.block(dialect.layer, rope, window=window_of(config, 0))],
        norm=norm(dialect.norm),
        head=target.output_head,
        target_ids=None,
        vocab_size=target.vocab_size,
    )

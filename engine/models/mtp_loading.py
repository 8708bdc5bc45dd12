"""Reads the MTP head in a target's own checkpoint."""

from pathlib import Path
from typing import Any

from outrider.kernels.model.rms_norm import Norm

from ..config import ModelConfig
from .architectures import load_config
from .checkpoint import Checkpoint, Progress
from .families import window_of
from .head_config import HeadError
from .head_loading import head_checkpoint
from .llama import LlamaReader
from .loading import quantised_format
from .mtp import MtpHead
from .mtp_config import MtpDialect, mtp_dialect
from .network import Network


def read_mtp_head(
    config: ModelConfig, target: Network, progress: Progress
) -> tuple[MtpHead, list[int]]:
    """The MTP head of the target in this directory, and the states that it reads: the last.

    Raises KeyError naming a tensor that is missing, HeadError naming what does not fit.
    """
    if config.head_layers is not None:
        raise HeadError("it reads the last layer's states: leave draft.head_layers out")
    folder = Path(config.path)
    dialect = mtp_dialect(folder)
    hf_config: Any = load_config(folder)
    quantised = quantised_format(config, hf_config)
    read = quantised[1] if quantised else None
    checkpoint = head_checkpoint(config, target, progress, read=read)
    return _build(dialect, hf_config, checkpoint, target), [len(target.attentions)]


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

"""The common part of loading heads: checks of settings, the checkpoint, and errors."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..config import ModelConfig
from .admission import DTYPES
from .any_checkpoint import Progress
from .checkpoint import Checkpoint
from .formats import Read
from .head_config import HeadError
from .network import Network


def check_settings(config: ModelConfig, target: Network) -> None:
    """Raises HeadError if a head cannot have these settings."""
    if config.quantization not in (None, "fp8"):
        raise HeadError(f"draft.quantization is {config.quantization!r}; it may be fp8")
    if config.dtype != "auto" and DTYPES.get(config.dtype) != target.dtype:
        raise HeadError(
            f"its dtype is set to {config.dtype}, but a head computes in its target's, which "
            f"is {str(target.dtype).removeprefix('torch.')}: leave draft.dtype out"
        )


def head_checkpoint(
    config: ModelConfig, target: Network, progress: Progress, *, read: Read | None = None
) -> Checkpoint:
    """The checkpoint of a head, which computes in its target's dtype; `read` as in Checkpoint."""
    rounds = config.quantization is not None
    folder = Path(config.path)
    return Checkpoint(
        folder, target.dtype, target.device, progress, read=read, rounds=rounds, rounds_logits=True
    )


@contextmanager
def errors_told(what: str) -> Iterator[None]:
    """Add the names of both models to errors."""
    try:
        yield
    except KeyError as error:
        raise HeadError(f"{what}: its file has no tensor {error}") from None
    except (SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise HeadError(f"{what}: its file is damaged or cut short ({error})") from None
    except (FileNotFoundError, HeadError, ValueError) as error:
        raise HeadError(f"{what}: {error}") from None
    except (OSError, RuntimeError) as error:
        raise HeadError(f"{what}: its file is damaged or cut short ({error})") from None

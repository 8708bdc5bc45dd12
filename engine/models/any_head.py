"""Loads a head of any kind for the target that it was made for."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from ..api import ignore_progress
from ..config import ModelConfig
from .admission import DTYPES
from .checkpoint import Progress
from .head import Head
from .head_config import HeadError
from .head_loading import read_head
from .loading import rounds_weights
from .mtp_loading import read_mtp_head
from .network import Network


def load_head(
    config: ModelConfig,
    target: Network,
    target_path: str,
    progress: Progress = ignore_progress,
) -> Head:
    """Load the head in a directory; from now on the target hands out the states that it reads.

    The head computes in the target's dtype. Raises HeadError naming both models.
    """
    name, read = ("MTP head of", read_mtp_head) if config.is_mtp else ("head", read_head)
    with _errors_told(f"the {name} {config.path} cannot draft for {target_path}"):
        _check_settings(config, target)
        head, tapped = read(config, target, progress)
        target.tap(tapped)
    if target.device.type == "cpu":
        head.pack(rounds=rounds_weights(config, is_draft=True))
    return head


def _check_settings(config: ModelConfig, target: Network) -> None:
    """Raises HeadError if a head cannot have these settings."""
    if config.quantization not in (None, "fp8"):
        raise HeadError(f"draft.quantization is {config.quantization!r}; it may be fp8")
    if config.dtype != "auto" and DTYPES.get(config.dtype) != target.dtype:
        raise HeadError(
            f"its dtype is set to {config.dtype}, but a head computes in its target's, which "
            f"is {str(target.dtype).removeprefix('torch.')}: leave draft.dtype out"
        )


@contextmanager
def _errors_told(what: str) -> Iterator[None]:
    """Add the names of both models to errors."""
    try:
        yield
    except KeyError as error:
        raise HeadError(f"{what}: its file has no tensor {error}") from None
    except (FileNotFoundError, ValueError) as error:
        raise HeadError(f"{what}: {error}") from None
    except (SafetensorError, pickle.UnpicklingError, EOFError, OSError, RuntimeError) as error:
        raise HeadError(f"{what}: its file is damaged or cut short ({error})") from None

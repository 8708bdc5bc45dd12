"""What is checked of the settings of any head, and how a head's errors are told."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from ..config import ModelConfig
from .admission import DTYPES
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

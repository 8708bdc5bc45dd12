"""What transformers' `from_pretrained` must be given for model directories of ours."""

from pathlib import Path

from outrider.engine.models.weight_files import GGUF, holds_gguf


def transformers_arguments(folder: Path) -> dict[str, str]:
    """Besides the directory, if it holds a GGUF file."""
    return {"gguf_file": GGUF} if holds_gguf(folder) else {}

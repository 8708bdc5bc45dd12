"""From a GGUF file to a directory that transformers loads."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.engine.api import ReportProgress

from .store import ModelError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# GGUF's general.file_type; everything else is quantised, and bfloat16 holds what it is worth.
_UNQUANTISED_DTYPES = {0: "float32", 1: "float16"}
# Names of tokenizer.ggml.pre. transformers knows a list of these and leaves any other name with
# GPT-2's splitting, without a word, which is right for GPT-2 alone. The second group splits digits
# off first (as llama.cpp does); names in neither group that come out with GPT-2's are refused.
_GPT2_SPLIT = {"gpt-2", "mpt", "olmo"}
_DIGITS_THEN_GPT2_SPLIT = {"smollm", "starcoder", "refact"}


def gguf_to_directory(source: Path, folder: Path, progress: ReportProgress) -> None:
    """Fill `folder` with the dequantised weights, config and tokenizer of a GGUF file.

    Raises ModelError where the file cannot be read, or its tokenizer not be rebuilt exactly.
    """
    # Seconds to import, and needed on the first start only.
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    stage = f"Converting {source.name}"
    progress(stage, 0, 0)
    try:
        fields = GGUFReader(source).fields
        file_type = fields["general.file_type"].contents() if "general.file_type" in fields else -1
        pre = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else None
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        _fix_pre_tokenizer(tokenizer.backend_tokenizer, pre, source)
        with _no_foreign_bars():
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                dtype=getattr(torch, _UNQUANTISED_DTYPES.get(file_type, "bfloat16")),
                quantization_config=GgufConfig(dequantize=True),  # else save_pretrained raises
            )
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _drop_invented_tokens(folder, len(fields["tokenizer.ggml.tokens"].data))
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"cannot convert {source}: {error}") from error
    progress(stage, 1, 1)


@contextlib.contextmanager
def _no_foreign_bars() -> Iterator[None]:
    """Keep transformers' own progress bars, some of which have no switch, off the screen."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _fix_pre_tokenizer(backend: Any, pre: str | None, source: Path) -> None:
    from tokenizers import pre_tokenizers

    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or pre in _GPT2_SPLIT:
        return
    if pre not in _DIGITS_THEN_GPT2_SPLIT:
        raise ModelError(
            f"cannot convert {source}: how its tokenizer splits text ({pre or 'not stated'}) is "
            "not known, and a guess would change what the model reads; use the model's original "
            "directory or hub id instead"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _drop_invented_tokens(folder: Path, num_tokens: int) -> None:
    """Remove added tokens that the GGUF file does not have.

    transformers gives every GPT-2 kind of tokenizer an `<|endoftext|>`, past the last embedding row
    where the file has none: text with these letters in it would become an id without a row.
    """
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < num_tokens]
    path.write_text(json.dumps(content, ensure_ascii=False))

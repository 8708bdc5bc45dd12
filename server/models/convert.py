"""Turns a GGUF file into a directory that transformers loads."""

import contextlib
import io
import logging
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outrider.engine.api import ReportProgress
from outrider.engine.models.weight_files import GGUF

from .gguf_config import config_of
from .store import ModelError

if TYPE_CHECKING:
    from outrider.engine.models.gguf_file import GgufFile

log = logging.getLogger(__name__)

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
# By GGUF's types of tensors; all others are quantised, and bfloat16 is precise enough for them.
_UNQUANTISED_DTYPES = {0: "float32", 1: "float16"}
# Names of tokenizer.ggml.pre. transformers knows some of them, and silently splits text for any
# other name as GPT-2 does, which is wrong for most. The second group splits off digits first (as
# llama.cpp does). Names in neither group that end up with GPT-2's splitting are refused.
_GPT2_SPLIT = {"gpt-2", "mpt", "olmo"}
_DIGITS_THEN_GPT2_SPLIT = {"smollm", "starcoder", "refact"}


def parts_of(path: Path) -> list[Path]:
    """The files of the model that begins with this one, by their names.

    Raises ModelError naming the parts that are missing, or the first if it was not given.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, number, total = found.groups()
    if int(number) > int(total):
        raise ModelError(f"{path} is part {int(number)} of {int(total)} by its name")
    names = [f"{stem}-{i:05}-of-{total}{path.suffix}" for i in range(1, int(total) + 1)]
    parts = [path.with_name(name) for name in names]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError(
            f"{path} is one of {int(total)} parts, of which {len(missing)} are missing: "
            f"{', '.join(missing[:3])}; put all of them into one folder"
        )
    if path != parts[0]:
        raise ModelError(f"{path} is not the first part of its model: give {parts[0].name}")
    return parts


def gguf_to_directory(source: Path, folder: Path, report: ReportProgress) -> None:
    """Fill `folder` with the weights, config and tokenizer of a GGUF file, or of all of its parts.

    The weights stay in the file if the engine can read them there; otherwise they are unpacked.
    Raises ModelError if the file cannot be read, or its model or tokenizer cannot be rebuilt
    exactly.
    """
    # These take seconds to import, and are needed only for the first start.
    from transformers import AutoTokenizer

    from outrider.engine.models.gguf_checkpoint import why_misread, why_unpacked
    from outrider.engine.models.gguf_file import GgufFile, UnknownTypeError

    from .gguf_parts import join, open_whole
    from .gguf_rope import ROPE_FACTORS, llama3_rope
    from .gguf_tokens import mend_tokenizer

    stage = f"Converting {source.name}"
    report(stage, 0, 0)
    held = folder / GGUF  # by itself: transformers would also read what lies beside the source
    try:
        parts = open_whole(parts_of(source))
        if len(parts) > 1:
            join(parts, held)
        else:
            held.symlink_to(source.resolve())
        file = GgufFile(held)
        rope = llama3_rope(file)
        if ignored := why_misread(file, () if rope is None else (ROPE_FACTORS,)):
            raise ModelError(
                f"cannot convert {source}: it has {ignored}, which would be left out, and what is "
                "left is another model; use the model's original directory or hub id instead"
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        _fix_pre_tokenizer(
            tokenizer.backend_tokenizer, file.metadata.get("tokenizer.ggml.pre"), source
        )
        try:
            reason = why_unpacked(file)
        except UnknownTypeError as error:
            reason = str(error)
        if reason is None:
            _keep_file(held, file, rope)
        else:
            dtype = _unpacked_dtype(file)
            log.info("the weights of %s are unpacked to %s: %s", source.name, dtype, reason)
            _warn_of_later_layers(source, file)
            _unpack(held, file, dtype, rope)
            held.unlink()
        tokenizer.save_pretrained(folder)
        mend_tokenizer(folder / "tokenizer.json", file.metadata)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"cannot convert {source}: {error}") from error
    report(stage, 1, 1)


def _warn_of_later_layers(source: Path, file: "GgufFile") -> None:
    """transformers leaves layers out that the metadata do not count."""
    from outrider.engine.models.unread import layer_of, warn_of_unread

    num_layers = file.metadata[f"{file.metadata['general.architecture']}.block_count"]
    later = [name for name in file.entries if layer_of(name) >= num_layers]
    warn_of_unread(str(source), later, SimpleNamespace(num_hidden_layers=num_layers))


def _keep_file(held: Path, file: "GgufFile", rope: dict[str, Any] | None) -> None:
    """Keep the file itself, with a config beside it. Raises ValueError if tensors are missing."""
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from outrider.engine.models.gguf_checkpoint import missing_tensors

    if missing := missing_tensors(file):
        raise ValueError(f"it lacks {', '.join(missing[:3])}; get the file again")
    config = config_of(held, file, rope)
    config.dtype = "bfloat16"  # of everything but the weights
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    _set_tokens(config, file)
    config.save_pretrained(held.parent)
    GenerationConfig.from_model_config(config).save_pretrained(held.parent)
    if held.is_symlink():
        source = held.readlink()
        held.unlink()
        try:
            os.link(source, held)
        except OSError:  # another disk, or one without links
            shutil.copyfile(source, held)


def _unpacked_dtype(file: "GgufFile") -> str:
    """The dtype in which most of the numbers are, whatever the metadata say."""
    numbers: Counter[str] = Counter()
    for entry in file.entries.values():
        numbers[_UNQUANTISED_DTYPES.get(entry.type_id, "bfloat16")] += math.prod(entry.shape)
    return numbers.most_common(1)[0][0]


def _set_tokens(config: Any, file: "GgufFile") -> None:
    """Name those tokens that the file has: transformers has others for files that name none."""
    from .gguf_tokens import end_token_ids

    ids = end_token_ids(file.metadata)
    config.eos_token_id = ids if len(ids) > 1 else next(iter(ids), None)
    for name, key in (("bos", "bos"), ("pad", "padding")):
        setattr(config, f"{name}_token_id", file.metadata.get(f"tokenizer.ggml.{key}_token_id"))


def _unpack(held: Path, file: "GgufFile", dtype: str, rope: dict[str, Any] | None) -> None:
    """Write the weights as transformers reads them. Raises ValueError if some are missing."""
    import torch
    from transformers import GenerationConfig, GgufConfig

    from outrider.engine.models.pretrained import load_pretrained

    config = config_of(held, file, rope)
    _set_tokens(config, file)
    with contextlib.redirect_stderr(io.StringIO()):  # some of its progress bars have no switch
        model = load_pretrained(
            held,
            config,
            torch.device("cpu"),
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),  # otherwise save_pretrained raises
        )
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.save_pretrained(held.parent)


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

"""The configs of models, also of architectures that transformers does not know.

Such an architecture is registered with transformers when this module is imported. The Python code
that its checkpoints bring is never run. The classes of models are in `model_classes.py`: whatever
reads configs alone must not wait until transformers has imported its models.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, Qwen2Config

# The types of RoPE that we compute; others depend on the length of the sequence.
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


# Models that also read images, of which the text is served.
TEXT_ALONE = {"qwen3_5", "qwen3_5_moe"}


class MiMoConfig(Qwen2Config):
    """A Qwen2 whose checkpoint also holds an MTP layer."""

    model_type = "mimo"


AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)


def load_config(directory: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a model directory; of its text, if that is all that is served of the model.

    Raises ValueError, OSError or KeyError, as transformers does, if it cannot be read or
    contradicts itself.
    """
    with invalid_config_as_value_error():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    for part in (config, config.get_text_config()):
        part.return_dict = True  # else models return tuples
    _check_expert_counts(json.loads((Path(directory) / "config.json").read_text("utf-8")), config)
    if config.model_type not in TEXT_ALONE:
        return config
    text = config.get_text_config()
    text.dtype = text.dtype or config.dtype
    text.tie_word_embeddings |= config.tie_word_embeddings
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantised
    return text


def _check_expert_counts(stated: dict[str, Any], config: PreTrainedConfig) -> None:
    """Refuse a number of experts that has two values, by two names that transformers takes for one:
    which one it would be depends on their order. Other numbers may: published configs have some.
    """
    text = config.get_text_config()
    if text is not config and isinstance(stated.get("text_config"), dict):
        stated = stated["text_config"]
    for name, other in text.attribute_map.items():
        if "expert" not in name:
            continue
        values = stated.get(name), stated.get(other)
        if all(isinstance(value, int | float) for value in values) and values[0] != values[1]:
            raise ValueError(
                f"its config.json has {name} {values[0]} and {other} {values[1]}, which mean the "
                "same: remove the wrong one"
            )


def eos_token_ids(directory: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end an answer: those in the generation config, else in the text part of the
    model's config, and the tokenizer's own. Raises ValueError if the generation config is damaged.
    """
    stated, path = None, directory / "generation_config.json"
    try:
        if path.exists():
            stated = json.loads(path.read_text("utf-8")).get("eos_token_id")
        if stated is None:
            stated = getattr(config, "eos_token_id", None)
        found = [*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id]
        return tuple(sorted({int(token_id) for token_id in found if token_id is not None}))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


@contextmanager
def invalid_config_as_value_error() -> Iterator[None]:
    """Raises ValueError, on one line, where transformers finds that a config contradicts itself:
    it has an error of its own for that, of several lines, or fails in computing with its numbers.
    """
    try:
        yield
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (ArithmeticError, AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"its config.json is damaged ({type(error).__name__}: {error})") from error

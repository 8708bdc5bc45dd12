"""The complete input of a distillation: the same recipe makes the same draft."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from safetensors import SafetensorError

from .whole_file import whole_file

# A model of its own, or a head that reads the target's states: a new one, the target's own, or one
# that drafts whole blocks, which goes on from another.
DraftKind = Literal["draft", "eagle3", "mtp", "dflash"]
Divergence = Literal["forward_kl", "total_variation"]

_OF_TEXT = (
    "prompts", "raw_share", "seed", "conversations_per_shard", "max_prompt_tokens",
    "max_answer_tokens",
)  # fmt: skip
_SIZE = re.compile(r"(\d+)x(\d+)")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_TOKENS = {"K": 10**3, "M": 10**6, "B": 10**9}


class DistillError(RuntimeError):
    """The distillation cannot go on; the message says why, and what to do."""


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Raises DistillError naming a file of unfinished work that does not hold what was written."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, SafetensorError) as error:
        raise DistillError(
            f"{path} is damaged ({error}): put a copy of it back, or remove {path.parent} to start "
            "over"
        ) from error


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a draft: a Llama of few narrow layers, with its head tied to its embedding."""

    num_layers: int
    hidden_size: int
    head_dim: int = 64

    @staticmethod
    def parse(text: str) -> "Size":
        """`LAYERSxWIDTH`, as in `2x256`."""
        match = _SIZE.fullmatch(text)
        if match is None or int(match[1]) < 1 or int(match[2]) % 64 or int(match[2]) == 0:
            raise DistillError(
                f"size is {text!r}; it is LAYERSxWIDTH, the width a multiple of 64, as in 2x256"
            )
        return Size(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """How much to spend: seconds in all, or training tokens. One of the two is set."""

    seconds: float | None = None
    tokens: int | None = None

    @staticmethod
    def parse(text: str) -> "TrainingBudget":
        """`90s`, `10m`, `2h`, or tokens: `500K`, `50M`, `1B`."""
        number, unit = text[:-1], text[-1:]
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if amount > 0 and unit in _SECONDS:
            return TrainingBudget(seconds=amount * _SECONDS[unit])
        if amount > 0 and unit in _TOKENS:
            return TrainingBudget(tokens=int(amount * _TOKENS[unit]))
        raise DistillError(
            f"budget is {text!r}; it is a time (90s, 10m, 2h) or training tokens (500K, 50M, 1B)"
        )


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a budget pays for. Fixed once, so that an interrupted run continues alike."""

    num_shards: int
    num_steps: int | None = None  # None until it has been measured how long a step takes

    def save(self, path: Path) -> None:
        with whole_file(path) as scratch:
            scratch.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One distillation. Lengths are in tokens of the target's vocabulary."""

    target: str  # a local model directory
    out: str
    kind: DraftKind = "draft"
    size: str = "3x256"
    start: str | None = None  # directory of a draft or head to continue from; None: a new one
    budget: str = "10m"
    text: str | None = None  # a folder that keeps the text for other recipes; None: not kept
    prompts: str | None = None  # a file or data set of user turns; None: the target writes them
    divergence: Divergence = "forward_kl"
    # For the last steps, which are too small for the first one to gain anything.
    last_divergence: Divergence = "total_variation"
    last_share: float = 0.25  # share of the steps
    seed: int = 0
    device: str = "cpu"  # cpu | cuda: every visible GPU | cuda:N
    # Writing: half of the answers are greedy, the others drawn at temperatures from 0.6 to 1.
    raw_share: float = 0.25  # share of texts without the chat template, as /v1/completions has them
    conversations_per_shard: int = 16
    max_prompt_tokens: int = 192
    max_answer_tokens: int = 512
    writers_per_device: int | None = None  # processes; None: on a GPU as many as keep it busy
    passes: int = 4  # over the text
    # Training.
    reading_tokens: int = 2048  # that the target reads at once
    row_tokens: int = 1024
    batch_tokens: int = 2048
    micro_batch_rows: int = 1
    learning_rate: float = 8e-3
    # For eagle3 and mtp heads.
    head_steps: int = 3  # steps of the training-time test: drafts in a row
    draft_vocab: int = 0  # eagle3: the most frequent tokens, so many, are drafted; 0: by the target

    @staticmethod
    def of(device: str, **given: Any) -> "Recipe":
        """A recipe with batch sizes that suit the device."""
        if (kind := given.get("kind", "draft")) != "draft":
            # A head starts out from parts of the target, and computes rows several times.
            rate = 2e-3 if kind == "eagle3" else 3e-4  # the others have learnt already
            given = {"learning_rate": rate, "micro_batch_rows": 4 if device != "cpu" else 1} | given
        if device.startswith("cuda"):
            given = {
                "conversations_per_shard": 1024,
                "micro_batch_rows": 16,
                "reading_tokens": 16384,
                "batch_tokens": 65536,
            } | given
        return Recipe(device=device, **given)

    def of_text(self) -> dict[str, Any]:
        """The settings that decide how the text comes out."""
        given = asdict(self)
        return {name: given[name] for name in _OF_TEXT} | {"target": Path(self.target).name}

    @staticmethod
    def load(path: Path) -> "Recipe":
        """Of the fields in a JSON object; raises DistillError."""
        try:
            given = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise DistillError(f"cannot read the recipe {path}: {error}") from None
        if not isinstance(given, dict):
            raise DistillError(f"the recipe {path} is no JSON object")
        allowed = get_type_hints(Recipe)
        if unknown := given.keys() - allowed.keys():
            names = ", ".join(sorted(unknown))
            raise DistillError(f"{path} has {names}; a recipe may have {', '.join(allowed)}")
        for name, hint in allowed.items():
            if name in given and not _is_one(given[name], hint):
                kind = hint.__name__ if isinstance(hint, type) else str(hint)
                raise DistillError(f"{path}: {name} is {given[name]!r}; it is of {kind}")
        if missing := {"target", "out"} - given.keys():
            raise DistillError(f"{path} lacks {' and '.join(sorted(missing))}")
        return Recipe.of(given.pop("device", "cpu"), **given)


def _is_one(value: object, hint: Any) -> bool:
    """Whether a value of JSON is one of a field's type."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)
